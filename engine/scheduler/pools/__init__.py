"""Pages and snapshots: which are free, and which are evicted next."""
