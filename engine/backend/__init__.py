"""What differs by machine: the BLAS, threads, memory allocation, array libraries."""
