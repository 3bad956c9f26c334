"""Tests of `shared.network`."""
