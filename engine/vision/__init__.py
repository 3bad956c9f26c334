"""Pictures: the vision encoder of a model, and the embeddings that it makes."""
