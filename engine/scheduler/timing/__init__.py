"""Sizes of chunks and shares of time, from measured costs."""
