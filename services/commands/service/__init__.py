"""`mlx-lm-server service`: run the server as a user service."""
