"""The texts of one request on their way through the engines.

They go in pieces, a few of them at a time: so the many texts of one request leave room for those of
others, and an engine that is lost costs a few pieces.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from router.fleet.engines import Model
from router.fleet.remote_texts import RemoteTexts, Rows
from router.fleet.router import Router
from router.fleet.tenants import Tenant
from router.generation.signal import Signal
from router.tokens.text_tokens import TokenizedPair
from shared.wire import Encode

PIECE_TEXTS = 64
PIECE_TOKENS = 8192
PIECES_AT_ONCE = 4


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who asks, and what a request's state has of it."""

    tenant: Tenant
    priority: int | None = None
    traceparent: str = ""
    limits_left: dict[str, str]
    """Headers that tell of the tenant's limits, filled here."""


@dataclass(frozen=True, kw_only=True)
class EncodedTexts:
    rows: Rows
    """(texts, dimensions), or (texts, 1) of scores."""
    num_tokens: int
    """Of all texts."""


async def encode(
    router: Router,
    model: Model,
    caller: Caller,
    prepare: Callable[[], Sequence[TokenizedPair]],
    size: int,
) -> EncodedTexts:
    """Return the rows of what ``prepare`` returns, which runs on a thread (``size`` as for a
    `WorkPool`).

    To be called within `Router.admit`. Raises what ``prepare`` raises, and `ApiError`."""
    tenant = caller.tenant
    priority = tenant.priority(caller.priority)
    replicas = model.replicas
    queue = router.dispatcher.queue_of(replicas)
    router.admission.check_queue(replicas, queue, tenant, priority=priority, new=1)
    texts = await router.work.run(tenant.name, prepare, size)
    num_tokens = sum(len(text.token_ids) for text in texts)
    await router.rate_limits.admit_prompt(tenant, num_tokens, caller.limits_left)
    # Equal texts have one row. Pieces have texts of about one length.
    places: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for number, text in enumerate(texts):
        places.setdefault((tuple(text.token_ids), text.second_start), []).append(number)
    distinct = sorted(places, key=lambda text: len(text[0]))
    width = _width(model)
    rows: Rows = np.empty((len(texts), width), np.float32)
    name = f"enc-{uuid.uuid4().hex}"
    changed = Signal()
    pieces = _pieces([len(text[0]) for text in distinct])
    running: dict[RemoteTexts, range] = {}
    begun = 0
    try:
        while begun < len(pieces) or running:
            while begun < len(pieces) and len(running) < PIECES_AT_ONCE:
                members = [distinct[i] for i in pieces[begun]]
                message = Encode(
                    request_id=f"{name}:{begun}",
                    attempt=0,
                    token_ids=[list(ids) for ids, _ in members],
                    second_starts=[at for _, at in members] if any(a for _, a in members) else [],
                    group=tenant.name or name,
                    priority=priority,
                    traceparent=caller.traceparent,
                )
                is_part = len(pieces) > 1
                piece = RemoteTexts(message, width, tenant, changed.set, is_part=is_part)
                running[piece] = pieces[begun]
                begun += 1
                version = replicas.version_for(has_output=begun > 1)
                router.dispatcher.admit(version, [piece])
            await changed.wait()
            for piece in [each for each in running if each.done]:
                numbers = running.pop(piece)
                if piece.error is not None:
                    raise piece.error
                assert piece.rows is not None
                for row, number in zip(piece.rows, numbers, strict=True):
                    rows[places[distinct[number]]] = row
    finally:
        for piece in running:
            router.dispatcher.release(piece)
    return EncodedTexts(rows=rows, num_tokens=num_tokens)


def _width(model: Model) -> int:
    task = model.hello.text_task
    return 1 if task is None else task.dimensions or 1


def _pieces(lengths: Sequence[int]) -> list[range]:
    """Cut texts with these ``lengths`` into pieces of `PIECE_TEXTS` and `PIECE_TOKENS` at most, or
    of one text."""
    found, first, tokens = [], 0, 0
    for number, length in enumerate(lengths):
        full = number - first == PIECE_TEXTS or tokens + length > PIECE_TOKENS
        if full and number > first:
            found.append(range(first, number))
            first, tokens = number, 0
        tokens += length
    return [*found, range(first, len(lengths))]
