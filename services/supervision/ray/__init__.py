"""Engines on the machines of a Ray cluster: `mlx-lm-server --cluster ray`.

Ray places engines and restarts them; it handles no requests. `cluster` prepares a server for it,
`launcher` starts engines and receives their messages, `host` runs next to each engine.
"""
