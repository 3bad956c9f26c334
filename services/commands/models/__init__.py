"""`mlx-lm-server models`: the models on this machine, and which of them fit."""
