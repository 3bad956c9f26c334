"""Models that embed or rank: a loop of passes without slots and without KV."""
