"""Which way of batching gives the logits of mlx-lm, found by running both."""
