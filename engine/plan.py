"""The plan of one step and its result: the seam between scheduler and executor.

The scheduler decides everything and writes it into a `Plan`. The executor runs the plan and
decides nothing. Both sides are plain data without mlx, so that a plan can be logged, replayed,
sent to another rank, or run by a fake.

The storage that plans refer to:

* A **slab** is a set of rows of one capacity (tokens). It is allocated and freed as a whole, and
  may get more rows, or lose the last ones. A **slot** is one row of a slab. It holds the KV of
  one running sequence, left-aligned: the token at position p lies at index p. Writing beyond a
  sequence's length is harmless: those positions are never attended to, and are overwritten when
  the sequence gets there.
* A **block** is an immutable copy of ``block_size`` consecutive positions of some sequence, in
  all layers. The executor knows it by an integer id that the scheduler assigns. Sequences never
  read blocks in place; blocks are copied into slots.
* A **snapshot** is an immutable copy of the recurrent state that a sequence had after a number
  of positions, for models with recurrent layers. Its id comes from the same numbers as those of
  blocks, and it is evicted like a block. A `Move` takes the slot's state along.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from shared.wire import Grammar, PackedLogprobs, SamplingParams, TokenLogprobs

Payload = tuple[bytes | memoryview, ...]
"""The content of a block or a snapshot: one buffer per storage group of the model, or per array of
its state. Order and sizes are the same throughout a namespace."""


class StateSearch(NamedTuple):
    """The state with which a fetch of blocks should end: the last one that the blocks reach.

    Counts are numbers of leading ``hashes``: a state at count n follows block ``hashes[n - 1]``."""

    hashes: list[bytes]  # of consecutive blocks; the last ones are to be fetched
    num_ready: int  # number of blocks that need not be fetched
    in_ram: tuple[int, ...] = ()  # counts above `num_ready` that have a state in RAM


class StoreRoom(NamedTuple):
    """What may be sent to the kvstore now."""

    files: int
    size_bytes: int

    def fits(self, files: int, size_bytes: int) -> bool:
        return files <= self.files and size_bytes <= self.size_bytes


STORE_LIMIT = StoreRoom(256, 256 * 1024 * 1024)
"""What an engine has on the way to the kvstore at most."""


class Cancellation:
    """Whether a fetch is cancelled: its result is not used, so no more files need be read. Set by
    the scheduler, and read by threads of the kvstore's client."""

    is_set = False


class FoundState(NamedTuple):
    """A fetched state."""

    end: int  # its count in `StateSearch.hashes`
    payload: Payload


class Slot(NamedTuple):
    slab_id: int
    row: int


class PlanOp(msgspec.Struct, frozen=True, array_like=True):
    """Base class of the operations of a plan."""


class Evict(PlanOp, frozen=True):
    """Forget a block or a snapshot."""

    block_id: int  # of the block or the snapshot
    export: bool = False  # return its bytes in `StepResult.exported`


class SlabSpec(PlanOp, frozen=True):
    """Allocate a slab."""

    slab_id: int  # a new id
    rows: int
    capacity: int  # tokens of each row


class ResizeSlab(PlanOp, frozen=True):
    """Change the number of rows of a slab. Remaining rows keep their content and slots."""

    slab_id: int
    rows: int  # rows from this number on are not in use


class Insert(PlanOp, frozen=True):
    """Create a block or a snapshot from bytes."""

    block_id: int  # in the format of an earlier `Exported`
    payload: Payload  # as in an earlier `Exported`
    is_snapshot: bool = False


class BlockName(PlanOp, frozen=True):
    """The kvstore's name for a block or snapshot that this plan inserts or exports. Other ranks
    need it, because each inserts and stores its own part."""

    block_id: int  # of the block or the snapshot
    hash: bytes
    is_snapshot: bool = False


class Restore(PlanOp, frozen=True):
    """Copy blocks into a slot."""

    slot: Slot
    start: int  # position of the first block
    block_ids: tuple[int, ...]


class RestoreState(PlanOp, frozen=True):
    """Set the state of a slot to a snapshot."""

    slot: Slot
    position: int  # the snapshot was taken after this many positions
    snapshot_id: int


class Move(PlanOp, frozen=True):
    """Copy the first ``length`` positions of ``source`` to ``target``."""

    source: Slot
    target: Slot
    length: int


class CopyPositions(PlanOp, frozen=True):
    """Copy the KV of positions ``start`` to ``end`` of ``source`` to ``target``."""

    source: Slot
    target: Slot
    start: int
    end: int  # exclusive


class Decode(PlanOp, frozen=True):
    """Compute one token and sample the next one.

    With ``drafts``, their tokens are computed in the same pass, and a token is sampled after each.
    A draft is accepted if it equals the token sampled in its place and all drafts before it were
    accepted. The result is the run of tokens up to the first one not followed by an accepted draft:
    the same tokens that separate decodes without drafts would have sampled. Positions of rejected
    drafts count as never computed."""

    slot: Slot
    position: int  # of the input token; its KV is written here
    token_id: int | None
    """The input token. None is the token sampled by the slot's previous decode, which the scheduler
    may not have seen yet."""
    output_index: (
        int  # index of the output in its request; determines the noise together with the seed
    )
    sampling: SamplingParams
    forbidden: tuple[int, ...] = ()
    """Tokens that must not be sampled now (EOS before ``min_tokens``)."""
    logprobs: int | None = None  # number of alternatives to return
    history: tuple[int, ...] | None = None
    """All tokens at the positions before this one. Sent with the first decode in a slot if sampling
    looks back or there is a grammar."""
    constrained: bool = False
    """The token must be one that the grammar allows; a ``forbidden`` token only if the grammar
    allows nothing else."""
    grammar: Grammar | None = None  # sent with the first decode in a slot
    forced: int | None = None  # the token to choose, regardless of probability and grammar
    shift: int = 0  # added to the position that the model uses for rotation
    drafts: tuple[int, ...] = ()
    """Guessed tokens after the input, which is then given and not ``forced``. ``forbidden`` applies
    after each of them. None ends the sequence."""
    guesses: int = 0
    """Max number of tokens after the run that the executor guesses itself, if it can
    (`ExecutorSpec.guesses`). A later plan verifies them as drafts."""
    adapter: int = 0  # place of its adapter; 0: none
    before: tuple[int, ...] = ()
    """Known tokens at the positions right before the input. Their KV is computed in the same pass
    (`ExecutorSpec.decodes_ends`), in place of a pass of chunks. Then there are no drafts."""


class EncodePicture(PlanOp, frozen=True):
    """Compute embeddings of a picture, or continue computing them. Its arrays are stored with those
    received in requests (`engine.vision.pixels`)."""

    digest: bytes
    token_ids: tuple[int, ...]  # of the picture in a prompt
    layers: int  # layers of the encoder to compute now
    is_last: bool  # everything left is computed, and the embeddings are kept


class ShownPart(PlanOp, frozen=True):
    """Embeddings of a picture in a chunk."""

    digest: bytes
    first: int  # number of the picture's first embedding in the chunk
    places: tuple[int, ...]  # the embeddings replace the tokens of the chunk from this one on


class Chunk(PlanOp, frozen=True):
    """Compute the KV of consecutive tokens without sampling: the last token of a prompt goes
    through a `Decode`. The chunks of a plan form a pass, identified by the number of the plan.
    Later plans may compute the rest of it (`Stretch`); until then no other operation uses their
    slots."""

    slot: Slot
    start: int  # position of the first token
    token_ids: tuple[int, ...]
    target_ids: tuple[int, ...] = ()
    """The tokens that follow each of the first of ``token_ids``. Their log-probabilities are
    returned (`PromptLogprobs`)."""
    logprobs: int = 0  # number of alternatives to return with each
    pictures: tuple[ShownPart, ...] = ()
    shift: int = 0  # as in `Decode`
    axes: tuple[tuple[int, ...], ...] = ()
    """The positions of the tokens in three axes, if pictures have them (`engine.batch.axes`)."""
    adapter: int = 0  # as in `Decode`


class Stretch(PlanOp, frozen=True):
    """Continue a pass of chunks. Rows of different sequences are independent, so decodes and passes
    computed between two stretches of a pass do not change its bits.

    Source: "From Tokens to Layers: Redefining Stall-Free Scheduling for LLM Serving with Layered
    Prefill" (2025).
    """

    number: int  # of the pass: the step whose plan had its chunks, this one or an earlier one
    end: int
    """Number of layers of the pass to compute. It is complete with
    `ExecutorSpec.layers` or more."""


class Save(PlanOp, frozen=True):
    """Copy consecutive positions of a slot into new blocks, as they are after this plan's decodes
    and chunks."""

    slot: Slot
    start: int  # position of the first block
    block_ids: tuple[int, ...]


class SaveState(PlanOp, frozen=True):
    """Copy a slot's state into a new snapshot, as it is after this plan's decodes and chunks."""

    slot: Slot
    position: int  # the state follows this many positions
    snapshot_id: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The operations of one step. The executor runs them in the order of these fields."""

    step: int
    dropped_passes: tuple[int, ...] = ()  # passes that are abandoned
    dropped_pictures: tuple[bytes, ...] = ()  # digests: embeddings, including incomplete ones
    evictions: tuple[Evict, ...] = ()
    freed_slabs: tuple[int, ...] = ()
    freed_slots: tuple[Slot, ...] = ()
    """Slots vacated by a sequence with a grammar or a history, which can be dropped."""
    resized_slabs: tuple[ResizeSlab, ...] = ()  # those that lose rows come first
    new_slabs: tuple[SlabSpec, ...] = ()
    inserts: tuple[Insert, ...] = ()
    restores: tuple[Restore, ...] = ()
    state_restores: tuple[RestoreState, ...] = ()
    moves: tuple[Move, ...] = ()
    copies: tuple[CopyPositions, ...] = ()
    decodes: tuple[Decode, ...] = ()
    encodes: tuple[EncodePicture, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    stretches: tuple[Stretch, ...] = ()
    """The pass of ``chunks`` is computed completely if no stretch has its number."""
    saves: tuple[Save, ...] = ()
    state_saves: tuple[SaveState, ...] = ()
    exports: tuple[int, ...] = ()  # ids of blocks and snapshots
    names: tuple[BlockName, ...] = ()  # for everything inserted or exported


class Exported(NamedTuple):
    block_id: int  # of a block or a snapshot
    payload: Payload


class GrammarFault(str):
    """The reason of a failure for which the grammar of the request is at fault."""


class PromptLogprobs(NamedTuple):
    """Log-probabilities of the tokens that follow those at positions from ``start`` on."""

    slot: Slot
    start: int
    logprobs: PackedLogprobs


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    tokens: tuple[int, ...]  # the runs of the plan's decodes, concatenated
    runs: tuple[int, ...] = ()  # the length of each run; empty if every decode has one token
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # parallel to ``tokens``
    guesses: tuple[tuple[int, ...], ...] = ()
    """Guesses for the tokens after the run of each decode; empty if the executor
    guessed nothing."""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """New results for chunks with ``target_ids``, of this plan or an earlier one: without gaps, and
    before the result of the slot's first decode."""
    exported: tuple[Exported, ...] = ()  # of this plan or an earlier one
    failed: tuple[tuple[Slot, str], ...] = ()
    """The slots whose chunk or grammar raised an exception, with the reason: a `GrammarFault` if
    the request is at fault. Nothing of theirs was saved, and the rest of the chunk's pass is
    dropped; everything else in the plan was done."""
    failed_pictures: tuple[tuple[bytes, str], ...] = ()
    """Digests of pictures whose encoding failed, with the reason. Nothing is kept for them."""
    elapsed_s: float = 0.0  # time on the device of a step that overlapped with no other step
    chunks_apart: bool = False  # whether ``elapsed_s`` is without the chunks
    chunk_times: tuple[tuple[int, float], ...] = ()
    """New measurements of the time that such steps took for chunks: number of the step, and
    seconds."""
    build_s: float = 0.0  # host time to build and dispatch the step
    sample_s: float = 0.0
    """Host time to sample tokens. If the host is the device, neither this nor ``build_s`` includes
    computation time."""

    @property
    def run_lengths(self) -> tuple[int, ...]:
        """The tokens of each decode."""
        return self.runs or (1,) * len(self.tokens)
