"""OpenAI's Responses API: what it asks for as a `ChatRequest`, answers as it writes them, and
the store of earlier responses."""
