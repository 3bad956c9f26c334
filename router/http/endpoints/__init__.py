"""Endpoints that do not generate: models, tokens, rankings, health, administration, OpenAPI."""
