"""Batches as a model's layers see them, one kind for each way of attending."""
