"""The router: HTTP to clients, ZeroMQ to engines, and everything in between."""
