"""The zoo: every architecture of the installed mlx-lm, tiny and random, and what becomes
of it here. `python -m engine.zoo` builds and examines them all."""
