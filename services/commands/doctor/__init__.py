"""`mlx-lm-server doctor`: what is wrong with this set-up, and how to mend it."""
