"""The processes that a supervisor starts: router, engine, spare, kvstore, rank, download."""
