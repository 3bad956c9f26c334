"""LoRA adapters that requests name: read, kept in places, and added to rows of a batch."""
