"""Minutes of mixed load: `make soak`."""
