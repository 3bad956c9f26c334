"""Other servers beside this one, on the same weights and in turn: `make bench-peers`."""
