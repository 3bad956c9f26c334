"""`mlx-lm-server chat`: a conversation in the terminal, with any server that has OpenAI's API."""
