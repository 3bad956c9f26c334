"""Errors in a group of ranks."""


class RankFailed(Exception):
    """A rank cannot continue, so the group must start again. The message is one line
    for the log."""
