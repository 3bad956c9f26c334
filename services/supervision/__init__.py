"""Starts the processes of a server, keeps them running, and decides which engines there are."""
