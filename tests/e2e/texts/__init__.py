"""Texts are mlx-lm's own, whatever the cache, the batch or a restart does."""
