"""Batches over pages in the host's memory, and their attention."""
