"""KV memory: slabs of slots, blocks, snapshots, and how they are quantized."""
