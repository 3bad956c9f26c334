"""`mlx-lm-server service`: the server as a service of the user."""
