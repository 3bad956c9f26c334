"""Shared by all processes: messages, hashes, block files, settings, logs, exit codes."""
