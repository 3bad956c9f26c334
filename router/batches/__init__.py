"""OpenAI's files and batches: requests from a file, run in idle capacity."""
