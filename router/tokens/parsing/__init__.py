"""Replies taken apart: reasoning, tool calls, and the grammars that enforce them."""
