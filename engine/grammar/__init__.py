"""Structured output: grammars that llguidance compiles, and the matchers of sequences."""
