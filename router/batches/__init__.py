"""OpenAI's files and batches: requests of a file, run in the places that others leave."""
