"""Loads on a server and what its clients measure: for `mlx-lm-server bench` and for `bench/`."""
