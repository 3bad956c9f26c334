"""Blocks, snapshots and slots: which are free, and which are evicted next."""
