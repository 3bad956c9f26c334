"""Machine-dependent choices: BLAS, threads, memory allocation, array libraries."""
