"""The interface between the engine's main loop and an executor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.plan import Decode, Plan, StepResult
from engine.sampling.masks import GrammarMasker
from engine.sampling.sampler import Sampler


@dataclass(frozen=True, kw_only=True)
class ExecutorSpec:
    """The properties of an executor and its model that do not change."""

    batching: str  # how sequences are computed together, in a word: for logs and tables
    look_ahead: bool  # whether a plan may be dispatched before the plan before it was read
    batches_decodes: bool  # whether all decodes of a plan are computed in one pass
    max_sequences: int | None  # the limit of slots in use at once, None for no limit
    # Whether KV can be saved to blocks and state to snapshots, and restored from them.
    prefix_cache: bool
    keeps_kv: bool  # whether each token adds KV; if not, only state is saved and restored
    kv_bits: int  # bits of an element of the KV, 16 if all of it is in the model's own type
    block_token_bytes: int  # bytes of KV of one position of a block
    slot_token_bytes: int  # the same of a slot, which may keep more than a block does
    state_bytes: int  # bytes of a slot's recurrent state, whatever its capacity
    shares_slabs: bool = False
    """Whether slots of one capacity should share a slab. Its copy while it grows, one array at a
    time, is in ``slot_token_bytes`` then."""


class PendingStep(ABC):
    """A step that has been dispatched."""

    @abstractmethod
    def read(self) -> StepResult:
        """Wait for the step and return its result. Called once, in order of dispatch."""


class Executor(ABC):
    """Holds the model and the KV, and runs plans. All calls come from one thread."""

    spec: ExecutorSpec
    logits_observer: Callable[[Sequence[Decode], mx.array], None] | None = None
    """Called with the decodes of each plan and their logits (rows, vocab): for proofs."""
    _sampler: Sampler

    def use_grammars(self, masker: GrammarMasker) -> None:
        """Accept plans with constrained decodes from now on."""
        self._sampler.masker = masker

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
