"""Checks and records of every request: keys, hosts, errors, access log, traces."""
