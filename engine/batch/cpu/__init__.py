"""Batches and products on the CPU, computed by NumPy, ONNX Runtime and a fast BLAS instead of
MLX."""
