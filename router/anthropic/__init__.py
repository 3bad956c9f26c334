"""Anthropic's Messages API: what it asks for as a `ChatRequest`, and answers as it writes them."""
