"""The scheduler's output to other components, and its counters."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from engine.plan import Cancellation, GrammarFault, PartSearch, Payload, StateSearch
from engine.scheduler.sequences.sequence import Sequence
from shared import wire


class Fetch(NamedTuple):
    """A request to the kvstore."""

    ticket: int
    hashes: list[bytes]  # of consecutive blocks
    end: StateSearch | PartSearch | None
    """What follows the last block that is found: a state, for models with recurrent state, or a
    part of a page. None: nothing."""
    cancellation: Cancellation


class Store(NamedTuple):
    """A block or a snapshot for the kvstore."""

    hash: bytes
    payload: Payload
    is_state: bool = False


@dataclass(slots=True)
class Outputs:
    """Everything since the last `take`: messages for the router and the kvstore."""

    messages: list[wire.Accepted | wire.Refused] = field(default_factory=list)
    deltas: list[wire.Delta] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    touches: list[list[bytes]] = field(default_factory=list)
    """Hashes of blocks that were used, each list a part of a chain. The kvstore touches those of a
    list up to the first that it lacks."""
    state_touches: list[bytes] = field(default_factory=list)  # of snapshots, which are separate
    cache_added: list[bytes] = field(default_factory=list)
    cache_removed: list[bytes] = field(default_factory=list)
    """Net changes to the set of hashes from which sequences may start."""

    def add_delta(
        self,
        seq: Sequence,
        token_ids: list[int],
        now_s: float,
        *,
        logprobs: list[wire.TokenLogprobs] | None = None,
        prompt_logprobs: wire.PackedLogprobs | None = None,
        finish: wire.FinishReason | None = None,
        error: str | None = None,
    ) -> None:
        """Add a delta with the last outputs ``token_ids`` of ``seq``, or with new data of its
        prompt, and with the reason if it ended.

        The first delta with outputs and the last one include usage, because a router that cuts a
        text short never sees the last. So does each delta after drafts of a prediction.
        """
        num_known = len(seq.request.generated) + len(token_ids)
        first = bool(token_ids) and seq.num_output_tokens == num_known
        predicted = seq.drafts is not None and bool(seq.drafts.accepted or seq.drafts.rejected)
        self.deltas.append(
            wire.Delta(
                request_id=seq.request.request_id,
                attempt=seq.request.attempt,
                index=seq.num_output_tokens - len(token_ids),
                token_ids=token_ids,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                finish=finish,
                stop_token=seq.token_ids[-1] if finish == "stop" else None,
                error=error,
                param=_at_fault(seq, error),
                usage=seq.usage(now_s) if finish or first or predicted else None,
            )
        )

    def take(self, added: list[bytes], removed: list[bytes]) -> Outputs:
        """Return everything so far, with these cache events, and keep nothing."""
        taken = replace(self, cache_added=added, cache_removed=removed)
        self.messages, self.deltas, self.fetches, self.stores = [], [], [], []
        self.touches, self.state_touches = [], []
        return taken


def _at_fault(seq: Sequence, error: str | None) -> str | None:
    """Return the field of its request that is to blame for the ``error`` of ``seq``, if any."""
    if not isinstance(error, GrammarFault):
        return None
    return (seq.request.grammar.param if seq.request.grammar else None) or "grammar"


@dataclass(slots=True)
class Counters:
    """Totals since the start. In `wire.EngineStats` their names end with ``_total``."""

    steps: int = 0
    step_seconds: float = 0.0
    batch_rows: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    prefill_passes: int = 0
    prefill_stretches: int = 0
    cached_ram_tokens: int = 0
    cached_ssd_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    aborts: int = 0
    images: int = 0
    image_hits: int = 0
    encoded_images: int = 0
    encode_seconds: float = 0.0
