"""The router alone, and on paper."""
