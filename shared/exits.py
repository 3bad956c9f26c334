"""Exit codes of our processes: what they tell the supervisor."""

EXIT_OK = 0
EXIT_FAILED = 1
"""Something that must not happen has, and is in the log. Restarted."""
EXIT_USAGE = 2
"""A flag, variable or configuration file that makes no sense. One line on stderr."""
EXIT_STUCK = 70
"""The process ended itself because it made no progress. Restarted."""
EXIT_CONFIG = 78
"""A permanent error, after one clear line on stderr (no such model, port in use, full
disk at start). Not restarted."""
