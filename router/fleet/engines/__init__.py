"""Engines that have joined, and their models: sockets, records, cached prefixes."""
