"""Pictures: a model's vision encoder, and the embeddings it computes."""
