"""Times to first tokens of prompts, and their effect on others."""
