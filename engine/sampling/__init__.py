"""Tokens from logits, a row each: filters, penalties, noise, masks, log-probabilities."""
