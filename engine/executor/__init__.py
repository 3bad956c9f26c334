"""Executors: run one plan on the device and return its result."""
