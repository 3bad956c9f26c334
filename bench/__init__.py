"""Comparisons with other servers, in turn, on the same machine, weights and requests."""
