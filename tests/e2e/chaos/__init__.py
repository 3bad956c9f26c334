"""Load while processes, sockets and disks fail: `make chaos`."""
