"""Engines on the machines of a Ray cluster: `mlx-lm-server --cluster ray`.

Ray places engines and keeps them running; it sees no request. `cluster` prepares a server for it,
`launcher` starts engines and hears of them, `host` runs beside each engine.
"""
