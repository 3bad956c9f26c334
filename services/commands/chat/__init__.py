"""`mlx-lm-server chat`: a conversation in the terminal, with any server of OpenAI's API."""
