"""Errors that a GPU reports late.

MLX keeps one error per stream, and raises it where something next uses the stream: for example at
an evaluation of other arrays. It is gone then, and arrays that were never written count as
evaluated. So a part that catches errors of MLX must first wait for the work of others
(`Executor.wait`), or let errors pass that may be theirs."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def raise_late_errors() -> None:
    """Wait until a GPU has reported how the work ended that it has just finished. Raises:
    RuntimeError if some of it failed: arrays that were already read may then be wrong.

    Metal signals the event of an evaluation before it runs the handlers of its command buffers.
    These report errors, such as a lack of memory, and release buffers, which may be written in
    place only then. This keeps the GIL, so the caller should wait for an array first."""
    if mx.default_device() == mx.gpu:
        mx.synchronize()


def compute(*arrays: Any) -> None:
    """Evaluate ``arrays``, modules or trees of them. Raises: RuntimeError, also for late errors."""
    mx.eval(*arrays)
    raise_late_errors()


def is_device_failure(error: BaseException) -> bool:
    """Return whether a GPU could not compute something that it had begun."""
    return "command buffer execution failed" in str(error).lower()


def is_lost_device(error: BaseException) -> bool:
    """Return whether the GPU ignores this process: macOS does so after several errors, until the
    process ends."""
    return is_device_failure(error) and "ignored (for causing" in str(error).lower()


def takes_too_long(error: BaseException) -> bool:
    """Return whether the GPU was stopped because one of its operations took seconds."""
    words = ("impacting interactivity", "timeout", "0000000e:")  # the code of the first
    return is_device_failure(error) and any(word in str(error).lower() for word in words)
