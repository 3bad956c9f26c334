"""A model's own head for multi-token prediction (MTP): an additional layer that predicts later
tokens."""
