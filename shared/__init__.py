"""What the processes have in common: messages, hashes, block files, settings, logs, exit codes."""
