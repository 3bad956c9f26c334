"""Tokens from logits, row by row: filters, penalties, noise, masks, log-probabilities."""
