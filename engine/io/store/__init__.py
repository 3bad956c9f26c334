"""The client of the kvstore, for one or several ranks."""
