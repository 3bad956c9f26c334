"""Requests as sequences, and the table of all live ones."""
