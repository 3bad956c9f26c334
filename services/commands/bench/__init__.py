"""`mlx-lm-server bench`: load on a server, the executor alone, and the tiers of the cache."""
