"""Runs one plan on the device and returns what it sampled."""
