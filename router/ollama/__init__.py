"""Ollama's API: schemas, translation into a `ChatRequest`, answers, and what it says of models."""
