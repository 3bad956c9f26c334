"""Texts to vectors and scores, whatever the API that asks for them."""
