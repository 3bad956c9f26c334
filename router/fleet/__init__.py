"""The engines behind the router: their registry, the queue, placement, sequences in flight."""
