"""OpenAI's Responses API: schemas, translation to a `ChatRequest`, answers, and their store."""
