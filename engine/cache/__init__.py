"""KV memory: pages, tables of slots, snapshots, and their quantization."""
