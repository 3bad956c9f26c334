"""OpenAI's Responses API: schemas, translation into a `ChatRequest`, answers, and their store."""
