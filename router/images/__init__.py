"""Pictures in requests: decoded, and prepared for the model's vision encoder."""
