"""`mlx-lm-server batch`: a file of requests, answered in the background."""
