"""OpenAI's chat completions and text completions: endpoints, and the writer of their answers."""
