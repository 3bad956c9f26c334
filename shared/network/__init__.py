"""Addresses, ports and hosts; CURVE, and the list of keys that may join."""
