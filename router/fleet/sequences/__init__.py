"""Sequences in flight: each is a request to an engine, followed until it ends."""
