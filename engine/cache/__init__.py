"""KV memory: slabs of slots, blocks, snapshots, and their quantization."""
