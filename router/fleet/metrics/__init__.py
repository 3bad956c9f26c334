"""Metrics for Prometheus, and the figures of recent requests."""
