"""The SSD tier of the KV cache: blocks by hash in one directory, for several engines.

`directory` knows the files, `index` who was used last, `store` puts the two together,
`writer` writes behind a bounded queue, `server` speaks ZeroMQ.
"""
