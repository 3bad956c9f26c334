"""The messages that router, engine and kvstore exchange over ZeroMQ.

A message is multipart. Frame 0 is a msgpack map with the key ``type`` (the struct's tag) and the
struct's fields. Further frames are raw bytes that the struct describes (files, block payloads).
Unknown fields are ignored, so that a newer peer can add fields. A message that cannot be decoded
raises `WireError`; receivers count, log and drop it.

Times are sent as durations in seconds, never as wall-clock times. Hashes are sent as raw bytes.
"""

from shared.wire.adapters import *  # noqa: F403
from shared.wire.codec import *  # noqa: F403
from shared.wire.engine_messages import *  # noqa: F403
from shared.wire.images import *  # noqa: F403
from shared.wire.kvstore_messages import *  # noqa: F403
from shared.wire.parts import *  # noqa: F403
