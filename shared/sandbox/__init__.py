"""Shared by processes that handle untrusted input and the processes that start them."""
