"""The zoo: every architecture of the installed mlx-lm, as a tiny random model.

`python -m zoo` builds all of them and tests how they are served.
"""
