"""Models that are loaded and unloaded, and the files of their tokenizers."""
