"""Batches while they run: their lines, the places that lines wait for, their results."""
