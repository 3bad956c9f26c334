"""OpenAI's chat completions and text completions: endpoints, and writers of their answers."""
