"""The engines on this machine: which models are loaded, and how much memory each engine may use."""
