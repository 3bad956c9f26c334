"""Batches and products on the CPU, computed by NumPy and a fast BLAS instead of MLX."""
