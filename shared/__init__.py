"""What all processes share: messages, hashes, block files, settings, logs, exit codes."""
