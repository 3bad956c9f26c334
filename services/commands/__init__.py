"""The commands of `mlx-lm-server`. `cli` lists them and their modules."""
