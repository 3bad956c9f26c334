"""LoRA adapters named by requests: they are read, placed in memory, and applied to rows of a
batch."""
