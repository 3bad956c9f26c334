"""Conversations as templates and models take them."""
