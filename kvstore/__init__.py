"""The SSD tier of the KV cache: blocks by hash in one directory, shared by several engines.

`directory` owns the files and `index` the order of use. `store` keeps the two in step, `writer`
writes from a bounded queue, and `server` speaks ZeroMQ.
"""
