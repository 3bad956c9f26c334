"""Batches as a model's layers see them, one class for each kind of attention."""
