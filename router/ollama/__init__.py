"""Ollama's API: schemas, translation to a `ChatRequest`, answers, and information on models."""
