"""The client of the kvstore, also of several ranks."""
