"""Structured output: grammars, compiled by llguidance, and sequences' places in them."""
