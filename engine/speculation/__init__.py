"""Drafts: tokens that are guessed, and verified in the pass that computes the token before them."""
