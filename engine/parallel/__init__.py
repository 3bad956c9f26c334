"""Tensor parallelism: one engine over several processes, its ranks."""
