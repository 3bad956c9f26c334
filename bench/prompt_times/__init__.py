"""How soon prompts have their first token, and what others feel of it."""
