"""Choices that depend on the machine: BLAS, threads, memory allocation, array libraries."""
