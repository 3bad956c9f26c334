"""Parsing of answers into reasoning, text and tool calls, and grammars that enforce calls."""
