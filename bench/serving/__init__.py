"""Whole servers: agents' sessions, batches, restarts, where CPU time goes."""
