"""Computing vectors and scores of texts, for every API."""
