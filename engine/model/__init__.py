"""Finds, converts and loads models."""
