"""Processes that start, stop, fail and are replaced; models, limits and tenants."""
