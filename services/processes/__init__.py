"""The processes started by a supervisor: router, engine, spare, kvstore, rank, download."""
