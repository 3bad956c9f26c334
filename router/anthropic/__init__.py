"""Anthropic's Messages API: schemas, translation into a `ChatRequest`, and answers."""
