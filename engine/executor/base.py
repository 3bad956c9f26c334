"""The interface between the engine's main loop and an executor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from engine.adapters.places import AdapterStore
from engine.plan import Decode, Plan, StepResult
from engine.sampling.masks import GrammarMasker
from engine.sampling.sampler import Sampler
from engine.scheduler.config import Ring
from engine.scheduler.timing.chunks import MAX_TOKENS


@dataclass(frozen=True, kw_only=True)
class ExecutorSpec:
    """The properties of an executor and its model that do not change."""

    batching: str  # how sequences are computed together, in a word: for logs and tables
    look_ahead: bool  # whether a plan may be dispatched before the plan before it was read
    batches_decodes: bool  # whether all decodes of a plan are computed in one pass
    batches_chunks: bool  # whether the same holds for its chunks
    max_sequences: int | None  # the limit of slots in use at once, None for no limit
    # Whether KV can be saved to blocks and state to snapshots, and restored from them.
    prefix_cache: bool
    keeps_kv: bool  # whether each token adds KV; if not, only state is saved and restored
    kv_bits: int  # bits of an element of the KV, 16 if all of it is in the model's own type
    block_token_bytes: int  # bytes of KV of one position of a block
    slot_token_bytes: int  # the same of a slot, which may keep more than a block does
    state_bytes: int  # bytes of a slot's recurrent state, whatever its capacity
    block_buffers: tuple[int, ...] = ()  # bytes of each buffer of a stored block
    state_buffers: tuple[int, ...] = ()  # the same of a stored state
    state_layout: tuple[str, ...] = ()
    """Shapes and types of a state's arrays: stored states of another layout are not read."""
    verifies_drafts: bool = False  # whether decodes may have drafts
    guesses: str = ""
    """The name of what guesses tokens after a run (`Decode.guesses`); empty if nothing does."""
    shares_slabs: bool = False
    """Whether slots of one capacity should share a slab. Its copy while it grows, one array at a
    time, is in ``slot_token_bytes`` then."""
    rings: tuple[Ring, ...] = ()  # the part of ``slot_token_bytes`` that long slots do without
    max_chunk_tokens: int = MAX_TOKENS  # the most that a chunk should have
    has_experts: bool = False  # whether a chunk reads more of the weights than a decode
    layers: int = 1  # parts of a pass of chunks that plans may ask for one by one (`Stretch`)
    pass_token_bytes: int = 0  # activations of one token of a pass, estimated


class PendingStep(ABC):
    """A step that has been dispatched, or of which the chunks are still to be."""

    may_wait = False
    """Whether it is worth while to dispatch the next plan before this one is read."""

    @abstractmethod
    def read(self, *, early: bool = False) -> StepResult:
        """Wait for the step and return its result. Called once, in order of dispatch.

        With ``early`` the result does not wait for chunks, if it need not. They are dispatched by
        `finish` then; exports and times that are not known yet come with a later result."""

    def finish(self) -> None:  # noqa: B027  # not abstract: most steps have nothing left
        """Dispatch what is left of the plan. Called before the next plan is dispatched, or else
        done by then; after an early `read`, so that tokens are not late."""


class Executor(ABC):
    """Holds the model and the KV, and runs plans. All calls come from one thread."""

    spec: ExecutorSpec
    logits_observer: Callable[[Sequence[Decode], mx.array], None] | None = None
    """Called with the decodes of each plan and their logits (rows, vocab): for proofs."""
    _sampler: Sampler

    def use_grammars(self, masker: GrammarMasker) -> None:
        """Accept plans with constrained decodes from now on."""
        self._sampler.masker = masker

    def use_sampler(self, sampler: Sampler) -> None:
        """Choose tokens with ``sampler`` from now on. Called before the first plan."""
        self._sampler = sampler

    @property
    def deterministic(self) -> bool:
        """Whether a sequence's logits have the same bits whatever else is computed."""
        return False

    def make_deterministic(self) -> bool:
        """Give a sequence's logits the same bits whatever else is computed, from now on. Return
        whether that is possible."""
        return False

    def release_weights(self, files: Sequence[Path] = ()) -> None:
        """Give up those of the model's weights that are not used, or that can be looked up in
        ``files`` of its checkpoint. The model itself cannot be called any more."""
        return

    def adapter_store(self, store: AdapterStore) -> AdapterStore:
        """Return what keeps adapters as passes read them, which may be ``store``: that of the
        model's own layers."""
        return store

    @abstractmethod
    def dispatch(self, plan: Plan) -> PendingStep:
        """Start ``plan``.

        An error that concerns one chunk alone is reported in the result's ``failed``. Any
        other error raises, here or in `PendingStep.read`. After that, no slab, block or
        state is valid before `reset`."""

    @abstractmethod
    def reset(self) -> None:
        """Drop every slab, block and state, and every step that was not read."""


def is_allocation_failure(error: Exception) -> bool:
    """Return whether ``error`` means that memory ran out. MLX has no class of its own for it."""
    words = ("unable to allocate", "out of memory", "outofmemory", "insufficient memory", "malloc")
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)
