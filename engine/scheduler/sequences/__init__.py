"""Requests as sequences, and the table of all that are live."""
