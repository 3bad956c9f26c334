"""A running request: its sequences, and the text of its choices."""
