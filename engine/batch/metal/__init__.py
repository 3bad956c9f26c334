"""Kernels of our own for pages on a GPU, and how they are tried before they are used."""
