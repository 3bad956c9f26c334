"""A backend of LocalAI, over gRPC, in front of a server of ours."""
