"""The engines behind the router: registry, queue, placement, and sequences in flight."""
