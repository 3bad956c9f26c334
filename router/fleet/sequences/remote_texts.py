"""Texts to embed, or pairs to score, on an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from router.fleet.sequences.remote_request import RemoteRequest, RemoteRequestState
from router.fleet.tenants.tenant import Tenant
from shared.wire import Encode, Encoded

Rows = NDArray[np.float32]


class RemoteTexts(RemoteRequest):
    """The router's side of an `Encode`."""

    def __init__(
        self,
        encode: Encode,
        width: int,
        tenant: Tenant,
        on_change: Callable[[], None],
        *,
        is_part: bool,
    ) -> None:
        """``width`` is the number of values in a row. If it ``is_part`` of a request, other parts
        have rows from the same weights."""
        super().__init__(encode.request_id, encode.priority, tenant, on_change)
        self._encode, self._width, self._is_part = encode, width, is_part
        self.rows: Rows | None = None
        """One row for each text, once done."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self._encode.token_ids))

    @property
    def has_output(self) -> bool:
        return self._is_part

    def message(self, priority: int) -> Encode:
        return replace(self._encode, attempt=self.attempt, priority=priority)

    def rows_in(self, encoded: Encoded) -> Rows | None:
        """Return the rows of a reply, None if their number is wrong."""
        shape = len(self._encode.token_ids), self._width
        if len(encoded.rows) != 4 * shape[0] * shape[1]:
            return None
        found: NDArray[Any] = np.frombuffer(encoded.rows, "<f4").reshape(shape)
        return found

    def finish(self, rows: Rows | None) -> None:
        self.rows = rows
        self.state = RemoteRequestState.DONE
        self._on_change()
