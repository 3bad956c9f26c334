"""Load generation and client-side measurements, for `mlx-lm-server bench` and `bench/`."""
