"""Comparisons with other servers on the same machine, weights and requests, in turn."""
