"""The commands of `mlx-lm-server`. `cli` names them, and says where each is."""
