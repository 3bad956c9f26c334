"""Tests of `router.generation`."""
