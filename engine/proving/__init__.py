"""Finds the kind of batching that gives mlx-lm's logits, by running both."""
