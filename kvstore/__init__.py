"""The SSD tier of the KV cache: blocks by hash in one directory, shared by several engines.

`directory` owns the files, `index` the order of use, and `store` keeps both consistent. `writer`
writes from a bounded queue, and `server` speaks ZeroMQ.
"""
