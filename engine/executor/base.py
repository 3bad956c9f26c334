"""The interface between the engine's main loop and an executor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from engine.adapters.places import AdapterStore
from engine.plan import FEWEST_PAGE_TOKENS, Decode, Plan, StepResult
from engine.sampling.masks import GrammarMasker
from engine.sampling.sampler import Sampler
from engine.scheduler.timing.chunks import MAX_TOKENS


@dataclass(frozen=True, kw_only=True)
class ExecutorSpec:
    """The properties of an executor and its model that do not change."""

    batching: str  # how sequences are computed together, in one word: for logs and tables
    look_ahead: bool  # whether a plan may be dispatched before the previous result is read
    batches_decodes: bool  # whether all decodes of a plan are computed in one pass
    batches_chunks: bool  # whether the same holds for its chunks
    max_sequences: int | None  # max sequences that run at once, None: no limit
    # Whether sequences can share pages of KV, and continue from snapshots of state.
    prefix_cache: bool
    keeps_kv: bool  # whether each token adds KV; if not, only state is saved and restored
    kv_bits: int  # bits per KV element, 16 if all of it has the model's own type
    token_bytes: int  # bytes of one position in pages, in all layers
    state_bytes: int  # bytes of the recurrent state of one sequence
    page_tokens: int = FEWEST_PAGE_TOKENS  # positions of a page
    unpacked_token_bytes: int = 0
    """Bytes of one position whose values are kept outside of pages too (`Unpack`), with which steps
    are faster; 0 if the executor has no use for that."""
    gather_token_bytes: int = 0
    """Temporary bytes of one position while a pass reads pages: its values in the largest layer, as
    often as they exist at once."""
    gather_rows: int = 1  # max sequences of which such values exist at once
    pads_gathers: bool = False  # whether each of them takes as much as the longest
    page_buffers: tuple[int, ...] = ()  # bytes of each buffer of a stored page
    state_buffers: tuple[int, ...] = ()  # the same for a stored state
    state_layout: tuple[str, ...] = ()
    """Shapes and types of a state's arrays. Stored states with another layout are not read."""
    verifies_drafts: bool = False  # whether decodes may have drafts
    decodes_ends: bool = False  # whether decodes may compute known tokens too (`Decode.before`)
    guesses: str = ""
    """Name of the component that guesses tokens after a run (`Decode.guesses`); empty if there
    is none."""
    max_chunk_tokens: int = MAX_TOKENS  # max useful tokens of a chunk
    has_experts: bool = False  # whether a chunk reads more of the weights than a decode
    attends_by: str = ""  # how attention reads pages on a GPU, for logs and reports
    layers: int = 1  # parts of a pass of chunks that plans can request one by one (`Stretch`)
    pass_token_bytes: int = 0  # estimated size of the activations of one token of a pass
    score_bytes: int = 0
    """Estimated size of the attention scores of one token, for each position that it may attend
    to; 0 if the device does not store them."""


class PendingStep(ABC):
    """A step that has been dispatched, possibly except its chunks."""

    may_wait = False
    """Whether dispatching the next plan before reading this step is worth while."""

    @abstractmethod
    def read(self, *, early: bool = False) -> StepResult:
        """Wait for the step and return its result. Called once, in the order of dispatch.

        With ``early``, the result does not wait for chunks if possible. Then `finish` dispatches
        them; missing exports and times come with a later result."""

    def finish(self) -> None:  # noqa: B027  # not abstract: most steps have nothing left
        """Dispatch the rest of the plan. Must be called before the next plan is dispatched;
        after an early `read`, so that tokens are not delayed."""


class Executor(ABC):
    """Holds the model and the KV, and runs plans. All calls come from one thread."""

    spec: ExecutorSpec
    logits_observer: Callable[[Sequence[Decode], mx.array], None] | None = None
    """Called with the decodes of each plan and their logits (rows, vocab), for proofs."""
    _sampler: Sampler

    def use_grammars(self, masker: GrammarMasker) -> None:
        """Accept plans with constrained decodes from now on."""
        self._sampler.masker = masker

    def use_sampler(self, sampler: Sampler) -> None:
        """Sample tokens with ``sampler`` from now on. Called before the first plan."""
        self._sampler = sampler

    @property
    def host_bytes(self) -> int:
        """Bytes of KV that are not in MLX's memory."""
        return 0

    @property
    def deterministic(self) -> bool:
        """Whether a sequence's logits have the same bits whatever else is computed."""
        return False

    def make_deterministic(self) -> bool:
        """From now on, give a sequence's logits the same bits whatever else is computed. Return
        whether that is possible."""
        return False

    def release_weights(self, files: Sequence[Path] = ()) -> None:
        """Drop weights that are not used, or that can be looked up in the checkpoint's
        ``files``. The model itself cannot be called any more."""
        return

    def adapter_store(self, store: AdapterStore) -> AdapterStore:
        """Return the storage of adapters' factors. This may be ``store``, which belongs to the
        model's own layers."""
        return store

    @abstractmethod
    def dispatch(self, plan: Plan) -> PendingStep:
        """Start ``plan``.

        An error that concerns only one chunk is reported in the result's ``failed``. Any other
        error is raised, here or in `PendingStep.read`. After that, no page or state is valid
        until `reset`."""

    def wait(self) -> None:  # noqa: B027  # not abstract: most executors have nothing in flight
        """Wait until nothing is in flight, before something else uses the device
        (`engine.backend.device_errors`). Raises as `dispatch` does."""

    @abstractmethod
    def reset(self) -> None:
        """Drop all pages and states, and every unread step."""


def is_allocation_failure(error: Exception) -> bool:
    """Return whether ``error`` means that memory ran out. MLX and ONNX Runtime, whose words are the
    last, have no error class for that."""
    words = (
        *("unable to allocate", "out of memory", "outofmemory", "insufficient memory", "malloc"),
        *("bad_alloc", "bad allocation", "failed to allocate"),
    )
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)
