"""Real clients against a real server: `python -m tests.clients` makes docs/clients.md."""
