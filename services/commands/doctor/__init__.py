"""`mlx-lm-server doctor`: what is wrong with this setup, and how to fix it."""
