"""Models like Llama, computed as a whole outside MLX."""
