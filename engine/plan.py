"""The plan of one step and its result: the seam between scheduler and executor.

The scheduler decides everything and writes it into a `Plan`. The executor runs the plan and
decides nothing. Both sides are plain data without mlx, so that a plan can be logged, replayed,
sent to another rank, or run by a fake.

The storage that plans refer to:

* A **page** holds the KV of ``page_tokens`` consecutive positions of some sequence, in all layers.
  Pages are numbered from 0. Several sequences may read a page; only a page that one sequence has
  is written, and only behind the positions that others may read.
* A **slot** is the number of a running sequence. Its **table** names the pages with its KV: the
  token at position p lies in entry ``p // page_tokens``. Recurrent state, the last token and what
  sampling remembers are kept under the slot too. What a page holds behind a sequence's length is
  never read.
* A **snapshot** is an immutable copy of the recurrent state that a sequence had after a number of
  positions, for models with recurrent layers. The scheduler assigns its id.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec

from shared.wire import Grammar, PackedLogprobs, SamplingParams, TokenLogprobs

Payload = tuple[bytes | memoryview, ...]
"""The content of a page or a snapshot: buffers in the order of the model's storage groups, or one
per array of its state. Order and sizes are the same throughout a namespace."""

Slot: TypeAlias = int
"""The number of a running sequence, below the max number of sequences that run at once."""


FEWEST_PAGE_TOKENS = 64
"""Positions of a page, if blocks divide them. Fewer cost kernels, files and tables; with more, the
last page of a sequence wastes more."""


def page_tokens(block_size: int) -> int:
    """Return the positions of a page: whole blocks of ``block_size`` positions."""
    return -(-FEWEST_PAGE_TOKENS // block_size) * block_size


class StateSearch(NamedTuple):
    """The state with which a fetch of pages should end: the last one that the pages reach.

    Counts are numbers of leading ``hashes``: a state at count n follows page ``hashes[n - 1]``."""

    hashes: list[bytes]  # of consecutive pages; the last ones are to be fetched
    num_ready: int  # number of pages that need not be fetched
    in_ram: tuple[int, ...] = ()  # counts above `num_ready` that have a state in RAM


class PartSearch(NamedTuple):
    """The part of a page with which a fetch of pages should end: of the page after those that are
    found, the most blocks that are stored."""

    hashes: list[bytes]  # of the blocks of the pages to fetch, and of those after them
    page_blocks: int  # blocks of a page


class StoreRoom(NamedTuple):
    """The files and bytes that may be sent to the kvstore now."""

    files: int
    size_bytes: int

    def fits(self, files: int, size_bytes: int) -> bool:
        return files <= self.files and size_bytes <= self.size_bytes


STORE_LIMIT = StoreRoom(256, 256 * 1024 * 1024)
"""The most that an engine has on the way to the kvstore."""


class Cancellation:
    """Whether a fetch is cancelled: its result is not used, so no more files need be read. Set by
    the scheduler, and read by threads of the kvstore's client."""

    is_set = False


class FoundState(NamedTuple):
    """A fetched state."""

    end: int  # its count in `StateSearch.hashes`
    payload: Payload


class FoundPart(NamedTuple):
    """A fetched page, of which the last blocks were not computed when it was stored."""

    blocks: int  # its leading blocks that were
    payload: Payload


class PlanOp(msgspec.Struct, frozen=True, array_like=True):
    """Base class of the operations of a plan."""


class Export(PlanOp, frozen=True):
    """Return the bytes of a page or of a snapshot in `StepResult.exported`."""

    block_id: int  # under which they are returned; of the snapshot if ``page`` is None
    page: int | None = None
    positions: int | None = None
    """Of the page, with zeros in place of what it holds behind them. None: all."""


class Insert(PlanOp, frozen=True):
    """Write a page, or create a snapshot, from bytes."""

    block_id: int  # of the snapshot if ``page`` is None; otherwise only for `BlockName`
    payload: Payload  # as in an earlier `Exported`
    page: int | None = None


class BlockName(PlanOp, frozen=True):
    """The kvstore's name for a page or a snapshot that this plan inserts or exports. Other ranks
    need it, because each inserts and stores its own part."""

    block_id: int  # as in `Insert` and `Export`
    hash: bytes
    is_snapshot: bool = False


class Table(PlanOp, frozen=True):
    """Change the table of a slot: entries before ``first`` stay, and ``pages`` follow them."""

    slot: Slot
    first: int
    pages: tuple[int, ...]


def fixed_tables(slots: int, tokens: int, size: int) -> tuple[Table, ...]:
    """Return tables with pages of ``size`` for ``tokens`` positions of each slot below ``slots``,
    for callers without a scheduler."""
    count = -(-tokens // size)
    return tuple(Table(n, 0, tuple(range(n * count, (n + 1) * count))) for n in range(slots))


class CopyPage(PlanOp, frozen=True):
    """Copy the first ``positions`` of page ``source`` to page ``target``."""

    source: int
    target: int
    positions: int


class Unpack(PlanOp, frozen=True):
    """Keep the values of a slot's positions outside of its pages too, in the form that attention
    reads, from this plan on until the slot is freed. Only if `ExecutorSpec.unpacked_token_bytes`
    is not 0."""

    slot: Slot
    tokens: int  # room for so many positions; 0: drop the values


class RestoreState(PlanOp, frozen=True):
    """Set the state of a slot to a snapshot."""

    slot: Slot
    position: int  # the snapshot was taken after this many positions
    snapshot_id: int


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
    """All tokens at the positions before this one. Sent with a sequence's first decode in its slot
    if sampling looks back or there is a grammar."""
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
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens whose log-probabilities to return in place of the most likely ones'. Only with
    ``logprobs``."""
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


class SaveState(PlanOp, frozen=True):
    """Copy a slot's state into a new snapshot, as it is after this plan's decodes and chunks."""

    slot: Slot
    position: int  # the state follows this many positions
    snapshot_id: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The operations of one step. The executor runs them in the order of these fields."""

    step: int
    exports_first: tuple[Export, ...] = ()
    """Pages and snapshots as they are before this plan, which may overwrite or evict them."""
    dropped_passes: tuple[int, ...] = ()  # passes that are abandoned
    dropped_pictures: tuple[bytes, ...] = ()  # digests: embeddings, including incomplete ones
    evictions: tuple[int, ...] = ()  # ids of snapshots to forget
    freed_slots: tuple[Slot, ...] = ()
    """Slots that their sequence has left: all that is kept under them is dropped."""
    moved_pages: tuple[CopyPage, ...] = ()  # before the number of pages changes
    num_pages: int = 0
    """The number of pages from now on; 0: as before. Pages that remain keep their content."""
    tables: tuple[Table, ...] = ()
    copies: tuple[CopyPage, ...] = ()  # in this order
    inserts: tuple[Insert, ...] = ()
    unpacked: tuple[Unpack, ...] = ()
    state_restores: tuple[RestoreState, ...] = ()
    decodes: tuple[Decode, ...] = ()
    encodes: tuple[EncodePicture, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    stretches: tuple[Stretch, ...] = ()
    """The pass of ``chunks`` is computed completely if no stretch has its number."""
    state_saves: tuple[SaveState, ...] = ()
    exports: tuple[Export, ...] = ()  # as they are after this plan
    names: tuple[BlockName, ...] = ()  # for everything inserted or exported


def fixed_pages(slots: int, tokens: int, size: int, *, unpacks: bool) -> Plan:
    """Return the first plan of callers without a scheduler: each slot below ``slots`` gets pages of
    ``size`` for ``tokens`` positions (`fixed_tables`), and their values are kept outside of pages
    too if the executor ``unpacks``."""
    tables = fixed_tables(slots, tokens, size)
    return Plan(
        step=0,
        num_pages=sum(len(table.pages) for table in tables),
        tables=tables,
        unpacked=tuple(Unpack(slot, tokens) for slot in range(slots) if unpacks),
    )


class Exported(NamedTuple):
    block_id: int  # as in `Export`
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
    the request is at fault. What their pages hold of it is meaningless, and the rest of the
    chunk's pass is dropped; everything else in the plan was done."""
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
