"""Counts how often the host waits for the device."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten


class WaitCounter:
    """Counts the calls that wait for work in flight: evaluations, and reads of arrays.

    What is dispatched runs in order. So a call waits if its array was not dispatched before, or
    was dispatched after all that the host has waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.places: list[str] = []
        """Where the waits came from."""
        self._dispatched: dict[int, tuple[int, mx.array]] = {}
        self._now = self._waited = 0
        dispatch = mx.async_eval

        def async_eval(*trees: Any) -> None:
            self._now += 1
            for tree in trees:
                for _, array in tree_flatten(tree):
                    self._dispatched[id(array)] = self._now, array
            dispatch(*trees)

        monkeypatch.setattr(mx, "async_eval", async_eval)
        for owner, name in (
            (mx, "eval"),
            (mx, "synchronize"),
            (np, "asarray"),
            (np, "array"),
            (np, "from_dlpack"),
            *((mx.array, name) for name in ("tolist", "item", "__array__", "__bool__", "__iter__")),
            *((mx.array, name) for name in ("__int__", "__float__", "__dlpack__", "__repr__")),
        ):
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, self._noting(getattr(owner, name)))

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not args:  # of `mx.synchronize`: it waits for what was dispatched
                self._wait(self._now)
            for _, array in tree_flatten(args):
                if isinstance(array, mx.array):
                    self._wait(self._dispatched.get(id(array), (self._now + 1, array))[0])
            return original(*args, **kwargs)

        return call

    def _wait(self, dispatched: int) -> None:
        # Other tests of the process may have put operations for CPUs in the place of mlx-lm's.
        if dispatched > self._waited and not _in_operation_for_cpus():
            self.count += 1
            self._waited = dispatched
            self._now = max(self._now, dispatched)
            self.places.append("".join(traceback.format_stack(limit=6)[:-2]))


def _in_operation_for_cpus() -> bool:
    return any("/engine/cpu/" in frame.filename for frame in traceback.extract_stack(limit=8))
