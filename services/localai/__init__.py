"""A LocalAI backend, over gRPC, in front of one of our servers."""
