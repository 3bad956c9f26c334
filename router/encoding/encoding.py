"""The texts of one request on their way through the engines.

They are sent in pieces, a few at a time: a request with many texts then leaves room for other
requests, and losing an engine costs only a few pieces.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from router.errors import InvalidRequest
from router.fleet.engines.engine import Model
from router.fleet.router import Router
from router.fleet.sequences.remote_texts import RemoteTexts, Rows
from router.fleet.tenants.tenant import Tenant
from router.generation.signal import Signal
from router.tokens.text_tokens import TokenizedPair
from shared.wire import Encode

PIECE_TEXTS = 64
PIECE_TOKENS = 8192
PIECES_AT_ONCE = 4
MAX_NUMBERS = 2**22
"""Of all vectors of a request: in JSON, 80 MB."""

_Text = tuple[tuple[int, ...], int]
"""Token ids, and the position where the second text of a pair begins."""


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The tenant of the request, and the data for its response."""

    tenant: Tenant
    priority: int | None = None
    traceparent: str = ""
    limits_left: dict[str, str]
    """Rate limit headers of the tenant, filled in here."""


@dataclass(frozen=True, kw_only=True)
class EncodedTexts:
    rows: Rows
    """(texts, dimensions); for scores (texts, 1)."""
    num_tokens: int
    """Sum over all texts."""


async def encode(
    router: Router,
    model: Model,
    caller: Caller,
    prepare: Callable[[], Sequence[TokenizedPair]],
    size: int,
) -> EncodedTexts:
    """Return the rows for the result of ``prepare``, which runs on a thread (``size`` as for a
    `WorkPool`).

    Call it within `Router.admit`. Raises what ``prepare`` raises, and `ApiError`."""
    tenant = caller.tenant
    priority = tenant.priority(caller.priority)
    replicas = model.replicas
    queue = router.dispatcher.queue_of(replicas)
    router.admission.check_queue(replicas, queue, tenant, priority=priority, new=1)
    places = await router.work.run(tenant.share, lambda: _places(prepare()), size)
    num_texts, width = sum(map(len, places.values())), _width(model)
    if num_texts * width > MAX_NUMBERS:
        raise InvalidRequest(
            f"{num_texts} vectors of {width} numbers are too many for one request: send at most "
            f"{MAX_NUMBERS // width} texts.",
            param="input",
        )
    num_tokens = sum(len(ids) * len(numbers) for (ids, _), numbers in places.items())
    await router.rate_limits.admit_prompt(tenant, num_tokens, caller.limits_left)
    distinct = sorted(
        places, key=lambda text: len(text[0])
    )  # the texts of a piece have similar lengths
    rows: Rows = np.empty((num_texts, width), np.float32)
    async for numbers, found in _rows_of(router, model, caller, priority, distinct):
        for number, row in zip(numbers, found, strict=True):
            rows[places[distinct[number]]] = row
    return EncodedTexts(rows=rows, num_tokens=num_tokens)


def _places(texts: Sequence[TokenizedPair]) -> dict[_Text, list[int]]:
    """Return the indices of each distinct text: equal texts share a row."""
    places: dict[_Text, list[int]] = {}
    for number, text in enumerate(texts):
        places.setdefault((tuple(text.token_ids), text.second_start), []).append(number)
    return places


async def _rows_of(
    router: Router, model: Model, caller: Caller, priority: int, texts: Sequence[_Text]
) -> AsyncIterator[tuple[range, Rows]]:
    """Yield the rows of ``texts`` piece by piece, with their indices. Raises `ApiError`."""
    name, tenant, changed = f"enc-{uuid.uuid4().hex}", caller.tenant, Signal()
    pieces = _pieces([len(ids) for ids, _ in texts])
    waiting = deque(enumerate(pieces))
    running: dict[RemoteTexts, range] = {}
    version = model.replicas
    try:
        while waiting or running:
            while waiting and len(running) < PIECES_AT_ONCE:
                number, members = waiting.popleft()
                starts = [texts[i][1] for i in members]
                message = Encode(
                    request_id=f"{name}:{number}",
                    attempt=0,
                    token_ids=[list(texts[i][0]) for i in members],
                    second_starts=starts if any(starts) else [],
                    group=tenant.group or name,
                    priority=priority,
                    traceparent=caller.traceparent,
                )
                is_part = len(pieces) > 1
                piece = RemoteTexts(message, _width(model), tenant, changed.set, is_part=is_part)
                running[piece] = members
                # After the first piece the others follow it: all rows are of the same weights.
                version = version.version_for(has_output=number > 0)
                router.dispatcher.admit(version, [piece])
            await changed.wait()
            for piece in [each for each in running if each.done]:
                members = running.pop(piece)
                if piece.error is not None:
                    raise piece.error
                assert piece.rows is not None
                yield members, piece.rows
    finally:
        for piece in running:
            router.dispatcher.release(piece)


def _width(model: Model) -> int:
    task = model.hello.text_task
    return 1 if task is None else task.dimensions or 1


def _pieces(lengths: Sequence[int]) -> list[range]:
    """Divide texts of these ``lengths`` into pieces of at most `PIECE_TEXTS` texts and
    `PIECE_TOKENS` tokens, or a single text."""
    found, first, tokens = [], 0, 0
    for number, length in enumerate(lengths):
        full = number - first == PIECE_TEXTS or tokens + length > PIECE_TOKENS
        if full and number > first:
            found.append(range(first, number))
            first, tokens = number, 0
        tokens += length
    return [*found, range(first, len(lengths))]
