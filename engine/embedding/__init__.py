"""Embedding and reranking models: a loop of passes without slots and KV."""
