"""Sizes of chunks and shares of time, by measured costs."""
