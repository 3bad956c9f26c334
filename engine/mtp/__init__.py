"""A model's own head for multi-token prediction (MTP): one more layer, which guesses tokens."""
