"""`mlx-lm-server models`: the models of this machine, and what of them fits."""
