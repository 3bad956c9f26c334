"""Drafts: guessed tokens, verified in the pass that computes the token before them."""
