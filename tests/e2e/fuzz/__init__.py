"""Generated requests: `make fuzz`."""
