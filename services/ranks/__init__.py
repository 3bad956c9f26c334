"""The other ranks of an engine, on this machine and on others."""
