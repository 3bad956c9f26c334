"""Drafts: tokens per second with them, and equal texts."""
