"""What the engine's main loop asks of an executor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import mlx.core as mx

from engine.plan import Decode, Plan, StepResult
from engine.sampling.masks import GrammarMasker


class PendingStep(ABC):
    """A step that has been dispatched."""

    @abstractmethod
    def read(self) -> StepResult:
        """Waits for the step and returns what it gave. Called once, in order of dispatch."""


class Executor(ABC):
    """Holds the model and the KV, and runs plans. All calls come from one thread."""

    look_ahead: bool
    """Whether a plan may be dispatched before the one before it has been read."""

    prefix_cache: bool
    """Whether KV can be saved to blocks and state to snapshots, and restored from them."""

    keeps_kv: bool
    """Whether there is anything to save for each token; if not, only state is restored."""

    max_sequences: int | None
    """The most slots that may be in use at once, None for no limit of its own."""

    block_token_bytes: int
    """Bytes of KV of one position of a block."""

    slot_token_bytes: int
    """Bytes of KV of one position of a slot, which may keep more than blocks do."""

    kv_bits: int
    """Bits of the KV, 16 where all of it is in the model's own type."""

    batches_decodes: bool
    """Whether the decodes of a plan are computed in one pass."""

    logits_observer: Callable[[Sequence[Decode], mx.array], None] | None = None
    """Told the decodes of each plan and their logits (rows, vocab): for proofs."""

    state_bytes: int
    """Bytes of what a slot keeps besides, whatever its capacity: of its recurrent state."""

    batching: str
    """In a word, how sequences are computed together: for logs and tables."""

    @abstractmethod
    def use_grammars(self, masker: GrammarMasker) -> None:
        """From now on plans may have decodes that a grammar binds."""

    @abstractmethod
    def dispatch(self, plan: Plan) -> PendingStep:
        """Starts ``plan``. What concerns one chunk alone is reported in the result's
        ``failed``. Whatever else goes wrong raises, here or in `PendingStep.read`; then
        nothing that is held is to be trusted before `reset`."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets every slab, block and state, and every step that was not read."""


def is_allocation_failure(error: Exception) -> bool:
    """Whether ``error`` is for want of memory: MLX has no class of its own for it."""
    words = ("unable to allocate", "out of memory", "outofmemory", "insufficient memory", "malloc")
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)
