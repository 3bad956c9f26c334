"""The status page: its files, and the feed of the state that it shows."""
