"""Errors that a GPU reports late."""

from __future__ import annotations

import mlx.core as mx


def settle() -> None:
    """Wait until a GPU has reported how the work ended that it has just finished. Raises:
    RuntimeError if some of it failed: arrays that were already read may then be wrong.

    Metal signals the event of an evaluation before it runs the handlers of its command buffers.
    These report errors, such as a lack of memory, and release buffers, which may be written in
    place only then. This keeps the GIL, so the caller should wait for an array first."""
    if mx.default_device() == mx.gpu:
        mx.synchronize()
