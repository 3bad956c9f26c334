"""Servers that stand in for others: a hub of models, a collector of traces, any HTTP server."""
