"""`mlx-lm-server bench`: server load, executor steps, and cache tiers."""
