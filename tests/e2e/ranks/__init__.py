"""Engines of several processes, on one machine and on several."""
