"""Pages of keys and values in the host's memory, read and written by NumPy."""
