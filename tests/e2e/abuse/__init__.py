"""Requests by which one client could hurt others, beside one that means well: `make abuse`."""
