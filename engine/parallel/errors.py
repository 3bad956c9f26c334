"""Errors of a group of ranks."""


class RankFailed(Exception):
    """A rank cannot go on, so the group has to begin again. The text is one line for the log."""
