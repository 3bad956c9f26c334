"""The plan of one step, and what comes back: the seam between scheduler and executor.

The scheduler decides everything and says it here; the executor does it and
decides nothing. Both sides are plain data without mlx, so that a plan can be
logged, replayed, sent to another rank, or run by a fake.

The storage that plans talk about:

* A **slab** is a set of rows of one capacity (tokens), allocated and freed as a
  whole. A **slot** is one row of a slab; it holds the KV of one running sequence,
  left-aligned: the token at position p lies at index p. Writing beyond a sequence's
  length is harmless: whatever lies there is never attended to, and is overwritten
  when the sequence gets there.
* A **block** is an immutable copy of ``block_size`` consecutive positions of some
  sequence, in all layers, known to the executor by an integer id that the
  scheduler assigns. Sequences never read blocks in place, they are copied into slots.
* A **snapshot** is an immutable copy of the recurrent state that some sequence had after
  so many positions, for models that have such. It has an id as blocks have, from the
  same numbers, and is evicted as they are. A move takes the slot's state along.

Within one plan the executor does, in this order: ``evictions``, ``freed_slabs``,
``new_slabs``, ``inserts``, ``restores``, ``state_restores``, ``moves``, ``decodes``,
``chunks``, ``saves``, ``state_saves``, ``exports``.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from shared.wire import Grammar, Sampling, TokenLogprobs


class Slot(NamedTuple):
    slab_id: int
    row: int


class PlanOp(msgspec.Struct, frozen=True, array_like=True):
    """Base of the parts of a plan."""


class Evict(PlanOp, frozen=True):
    """Forget ``block_id``, or the snapshot of that id; with ``export`` its bytes come back in
    the step's result."""

    block_id: int
    export: bool = False


class SlabSpec(PlanOp, frozen=True):
    """Allocate ``rows`` rows of ``capacity`` tokens under the new id ``slab_id``."""

    slab_id: int
    rows: int
    capacity: int


class Insert(PlanOp, frozen=True):
    """``payload`` (as an earlier `Exported` had it) becomes ``block_id``, or with ``is_snapshot``
    the snapshot of that id."""

    block_id: int
    payload: tuple[bytes | memoryview, ...]
    is_snapshot: bool = False


class Restore(PlanOp, frozen=True):
    """Copy ``block_ids`` into ``slot``, the first of them at position ``start``."""

    slot: Slot
    start: int
    block_ids: tuple[int, ...]


class RestoreState(PlanOp, frozen=True):
    """The state of ``slot`` becomes that of ``snapshot_id``, which was taken after
    ``position`` positions."""

    slot: Slot
    position: int
    snapshot_id: int


class Move(PlanOp, frozen=True):
    """Copy the first ``length`` positions of ``source`` to ``target``."""

    source: Slot
    target: Slot
    length: int


class Decode(PlanOp, frozen=True):
    """One token in, one token out.

    The input token is ``token_id``, or, where that is None, the token that the slot's
    previous decode sampled (which the scheduler may not have seen yet). Its KV is
    written at ``position``. The output is the request's output number
    ``output_index``, which with the seed makes its noise. ``forbidden`` are tokens
    that must not be chosen now (EOS before ``min_tokens``). ``logprobs`` asks for
    that many alternatives. ``history`` are all tokens at the positions before this one:
    it comes with the first decode in a slot, where the sampling looks back. A ``constrained``
    row chooses what its grammar allows, ``forbidden`` tokens only where that is nothing else;
    ``grammar`` comes with the first decode in a slot, and ``history`` with it.
    """

    slot: Slot
    position: int
    token_id: int | None
    output_index: int
    sampling: Sampling
    forbidden: tuple[int, ...] = ()
    logprobs: int | None = None
    history: tuple[int, ...] | None = None
    constrained: bool = False
    grammar: Grammar | None = None


class Chunk(PlanOp, frozen=True):
    """Compute the KV of ``token_ids`` at positions from ``start`` on. Samples nothing:
    the last token of a prompt goes through a `Decode`.

    ``target_ids`` are the tokens that come after each of the first of ``token_ids``: their
    log-probabilities come back (`PromptLogprobs`), with ``logprobs`` alternatives each.
    """

    slot: Slot
    start: int
    token_ids: tuple[int, ...]
    target_ids: tuple[int, ...] = ()
    logprobs: int = 0


class Save(PlanOp, frozen=True):
    """Copy positions from ``start`` on into the new ``block_ids``, one after the other,
    as they are when this plan's decodes and chunks are done."""

    slot: Slot
    start: int
    block_ids: tuple[int, ...]


class SaveState(PlanOp, frozen=True):
    """Copy the slot's state into the new ``snapshot_id``, as it is when this plan's decodes
    and chunks are done, after ``position`` positions."""

    slot: Slot
    position: int
    snapshot_id: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    evictions: tuple[Evict, ...] = ()
    freed_slabs: tuple[int, ...] = ()
    new_slabs: tuple[SlabSpec, ...] = ()
    inserts: tuple[Insert, ...] = ()
    restores: tuple[Restore, ...] = ()
    state_restores: tuple[RestoreState, ...] = ()
    moves: tuple[Move, ...] = ()
    decodes: tuple[Decode, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    saves: tuple[Save, ...] = ()
    state_saves: tuple[SaveState, ...] = ()
    exports: tuple[int, ...] = ()


class Exported(NamedTuple):
    """The content of a block or a snapshot: one buffer per storage group of the model, or per
    array of its state, always in the same order and of the same sizes for one namespace."""

    block_id: int
    payload: tuple[bytes | memoryview, ...]


class PromptLogprobs(NamedTuple):
    """Log-probabilities of the tokens that follow those at positions from ``start`` on."""

    slot: Slot
    start: int
    logprobs: tuple[TokenLogprobs, ...]


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """``tokens`` and ``logprobs`` run parallel to the plan's decodes. ``prompt_logprobs`` is what
    became known of chunks with followers, of this plan or an earlier one, without gaps,
    and before the slot's first decode is known. ``elapsed_s`` is the time the step took
    on the device, as far as it was not shared with another. ``failed`` names the slots
    whose chunk raised, or whose grammar did, with the reason: nothing of theirs was saved,
    everything else in the plan was done. ``build_s`` is what the host took to put the step
    together and to dispatch it, and ``sample_s`` to choose tokens; where the device is the
    host itself, without the time that it computed.
    """

    step: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    exported: tuple[Exported, ...] = ()
    failed: tuple[tuple[Slot, str], ...] = ()
    elapsed_s: float = 0.0
    build_s: float = 0.0
    sample_s: float = 0.0
