"""Typed decisions: questions about a text, answered with probabilities, without generating text."""
