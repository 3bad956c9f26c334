"""API keys as tenants: their limits, and the windows in which these are counted."""
