"""Sizes prefill chunks and their stretches by predicted time, not by tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

logger = logging.getLogger(__name__)

UNIT_PASSES = 2.0
"""Target time of a chunk's smallest part, at least one layer, in decode steps: a new sequence
waits for it."""
STREAMING_UNIT_PASSES = 1.0
"""The same while others wait for their next token."""
MIN_UNIT_S = 0.008
"""Min of the same in seconds: nobody notices such a wait."""
GPU_MIN_UNIT_S = 0.03
"""The same on a GPU, which is slower with shorter chunks."""
EXPERTS_LAYER_S = 2.0
"""Target time of one layer of a chunk for models with experts while no stream runs. A chunk reads
all experts of a layer, so a prompt should be one chunk. A new sequence waits for its layer."""
ALONE_TOKENS = 384
"""Min tokens of a divisible chunk on a CPU while no stream runs. The first steps of a process are
slow. By their times, chunks would be so short that a prompt takes a quarter longer; and this many
tokens cost a newcomer little, because a single layer of them is computed without a break."""
ENDS_UNITS = 2.0
"""Max time of the ends of prompts in one decode while no stream runs, in units as above."""
STREAMING_TARGET_S = 0.4
"""Max time of an indivisible chunk while others wait for their next token."""
ALONE_TARGET_S = 0.75
"""The same when nobody waits."""
OUTLIER = 4.0
"""Longer chunks than predicted by this factor count as this long: kernels may have been compiled,
which takes seconds on CUDA."""
_DECODE_MIN_GROWTH = 1.02
"""Growth of the remembered shortest decode per step, so that it is forgotten over time."""
MAX_TOKENS = 1024
"""Max tokens of a chunk on a CPU, where longer ones are not faster (`bench prompts`). A GPU is
faster with longer chunks; there the executor sets the limit (`engine.executor.base`)."""
GPU_KERNEL_SCORES = 2048 * 65536
"""Max attention scores of a head in a chunk on a GPU, tokens times positions before them: macOS
stops an operation that takes seconds. 2,048 tokens at 64k ran on an M2 Ultra, at 128k they did not
(mlx#3302)."""
MIN_TOKENS = 64
SHARED_TOKENS = 256
"""Max total tokens of prompts in one pass on a CPU. A larger pass takes as long as one after the
other, and one after the other the first prompt is done earlier."""
GPU_SHARED_TOKENS = 2048
"""The same on a GPU, for which few tokens are little work."""


def costly_layers(layers: int) -> int:
    """Return how many of the ``layers`` of a pass take time: of the last one, a chunk needs only
    keys and values, unless it ends a prompt."""
    return max(layers - 1, 1)


def share_of_time(done: int, end: int, layers: int) -> float:
    """Return which part of the time of a pass its layers from ``done`` to ``end`` take."""
    costly = costly_layers(layers)
    return (min(end, costly) - min(done, costly)) / costly


class ChunkPolicy:
    """Sizes chunks so that one layer, or a whole indivisible chunk, takes about its target time.

    The chunks of a pass cost one pass over the weights, about the time of the shortest decode,
    regardless of their tokens. Each token then costs ``base`` seconds for the matmuls, and
    ``slope`` more for each token before it, for the attention. This line is fitted to the measured
    times of steps: least squares over chunks, weighted by their tokens, with decay. It starts with
    the values of a slow CPU, or less if decodes are faster than that. As long as all chunks were
    at about the same position, the ratio of slope to base is assumed to be the initial one. All
    `costly_layers` are assumed to cost the same."""

    _DECAY = 0.9
    _INITIAL_BASE_S = 3e-3
    _INITIAL_SLOPE = 1 / 600
    _TRUSTED_SPREAD_TOKENS = 100.0

    def __init__(
        self,
        block_size: int,
        fixed_tokens: int | None = None,
        max_tokens: int = MAX_TOKENS,
        *,
        layers: int = 1,
        has_experts: bool = False,
        on_gpu: bool = False,
    ) -> None:
        """``layers``: the number of parts of a pass that may be computed separately."""
        self._block_size = block_size
        self._fixed_tokens = fixed_tokens
        self._max_tokens = max_tokens
        self._shared_tokens = GPU_SHARED_TOKENS if on_gpu else SHARED_TOKENS
        self._min_unit_s = GPU_MIN_UNIT_S if on_gpu else MIN_UNIT_S
        self._kernel_scores = GPU_KERNEL_SCORES if on_gpu else None
        self.layers = layers
        self._costly_layers = costly_layers(layers)
        self._alone_layer_s = EXPERTS_LAYER_S if has_experts else 0.0
        self._decode_s = 0.0
        self.pass_s = 0.0
        # Weighted sums over chunks: of 1, position, position^2, cost, cost * position.
        self._sums = 5 * [0.0]
        self._guess_tokens = float(MIN_TOKENS)  # weight of the initial guess in these sums
        self._fit()

    def budget(self, *, streaming: bool, grouped: bool = False) -> ChunkBudget:
        """Return the budget shared by the chunks of a new pass. ``grouped``: no prompt of it would
        be done earlier for itself, so there may be as many tokens of all as of one."""
        if self._fixed_tokens is not None:
            return ChunkBudget(
                self, float("inf"), self._fixed_tokens, self._block_size, self._fixed_tokens
            )
        target_s = STREAMING_TARGET_S if streaming else ALONE_TARGET_S
        if self.layers > 1:
            layer_s = self.unit_s(streaming=streaming)
            if not streaming:
                layer_s = max(layer_s, self._alone_layer_s)
            target_s = self._costly_layers * layer_s
        shared_tokens = self._max_tokens if grouped and not streaming else self._shared_tokens
        budget = ChunkBudget(self, target_s, self._max_tokens, self._block_size, shared_tokens)
        budget.evens = not streaming
        if self.layers > 1 and not streaming:
            budget.first_tokens = ALONE_TOKENS
        return budget

    def shorten(self) -> bool:
        """Halve the longest chunk from now on: the device has a time limit for an operation. Return
        False if chunks cannot be shorter."""
        longest = self._max_tokens if self._fixed_tokens is None else self._fixed_tokens
        shorter = max(longest // 2, MIN_TOKENS)
        if shorter >= longest:
            return False
        logger.warning("chunks of prompts have at most %d tokens from now on", shorter)
        self._max_tokens = shorter
        self._fixed_tokens = None if self._fixed_tokens is None else shorter
        return True

    def unit_s(self, *, streaming: bool) -> float:
        """Return the seconds that a divisible pass may compute without a break."""
        if streaming:
            return max(STREAMING_UNIT_PASSES * max(self.pass_s, self._decode_s), self._min_unit_s)
        return max(UNIT_PASSES * self.pass_s, self._min_unit_s)

    def ends_s(self, *, streaming: bool) -> float:
        """Return the seconds that ends of prompts may add to one decode."""
        return (1.0 if streaming else ENDS_UNITS) * self.unit_s(streaming=streaming)

    def predict_s(self, start: int, tokens: int) -> float:
        """Return the predicted seconds that ``tokens`` tokens from ``start`` add to a pass over
        the weights."""
        return tokens * (self._base_s + self._slope_s * (start + tokens / 2))

    def tokens_within(self, start: int, seconds: float) -> int:
        """Return how many tokens from ``start`` add about ``seconds``, by `predict_s`; 0 if no
        time is left."""
        seconds = max(seconds, 0.0)
        first_s = self._base_s + self._slope_s * start
        return int(2 * seconds / (first_s + math.sqrt(first_s**2 + 2 * self._slope_s * seconds)))

    def predict_layer_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Return the predicted seconds of one layer of a pass with these ``chunks`` (start,
        tokens)."""
        whole_s = self.pass_s + sum(self.predict_s(start, tokens) for start, tokens in chunks)
        return whole_s / self._costly_layers

    def max_kernel_tokens(self, start: int) -> float:
        """Return the max tokens of a chunk from ``start`` whose attention is not too long for one
        operation of the device."""
        if self._kernel_scores is None:
            return math.inf
        return (math.sqrt(start**2 + 4 * self._kernel_scores) - start) / 2

    def observe_decodes(self, elapsed_s: float) -> None:
        """Learn from a step with decodes only."""
        if elapsed_s > 0:
            self._decode_s += (0.2 if self._decode_s else 1.0) * (elapsed_s - self._decode_s)
            self.pass_s = min(elapsed_s, self.pass_s * _DECODE_MIN_GROWTH or elapsed_s)
            self._fit()

    def observe_chunks(
        self,
        chunks: Sequence[tuple[int, int]],
        elapsed_s: float,
        *,
        share: float = 1.0,
        beside_decodes: bool = False,
    ) -> None:
        """Learn from a step that computed a ``share`` of a pass with these ``chunks`` (start,
        tokens), padded to the longest one."""
        if elapsed_s <= 0:
            return
        known_s = share * self.pass_s + (self._decode_s if beside_decodes else 0.0)
        spent_s = (elapsed_s - min(known_s, 0.9 * elapsed_s)) / share
        if self._guess_tokens < MIN_TOKENS / 2:
            predicted_s = sum(self.predict_s(start, tokens) for start, tokens in chunks)
            spent_s = min(spent_s, OUTLIER * predicted_s)
        width = max(n for _, n in chunks)
        tokens = width * len(chunks)
        position = sum(start + width / 2 for start, _ in chunks) / len(chunks)
        seen = (tokens, tokens * position, tokens * position**2, spent_s, spent_s * position)
        kept = self._DECAY**share
        self._sums = [kept * old + share * new for old, new in zip(self._sums, seen, strict=True)]
        self._guess_tokens *= kept
        self._fit()

    def _fit(self) -> None:
        # A decode computes a token too, so none takes longer than that.
        guess_s = min(self._INITIAL_BASE_S, self.pass_s or self._INITIAL_BASE_S)
        tokens, *sums = self._sums
        sums[2] += self._guess_tokens * guess_s
        weight = tokens + self._guess_tokens
        position, square, cost_s, product = (value / weight for value in sums)
        assumed_s = cost_s * self._INITIAL_SLOPE / (1 + position * self._INITIAL_SLOPE)
        trust = self._TRUSTED_SPREAD_TOKENS**2
        covariance, variance = product - cost_s * position, square - position**2
        self._slope_s = max(0.0, (covariance + trust * assumed_s) / (variance + trust))
        self._base_s = max(1e-7, cost_s - self._slope_s * position)


class ChunkBudget:
    """The seconds and tokens left for the chunks of one pass. They run as one batch, padded to
    the longest one, so only chunks of about the same length share a pass."""

    def __init__(
        self,
        policy: ChunkPolicy,
        seconds: float,
        tokens: int,
        block_size: int,
        shared_tokens: int,
    ) -> None:
        """The first chunk may have ``tokens`` tokens, and all together ``shared_tokens``."""
        self._policy = policy
        self._seconds = max(seconds - policy.pass_s, seconds / 2)
        self._spare_s = self._seconds / 2
        self._tokens = tokens
        self._unshared_tokens = tokens - min(tokens, shared_tokens)
        self._block_size = block_size
        self._min_tokens = self._whole_blocks(min(MIN_TOKENS, tokens))
        self._width = 0
        self._longest = 0
        self.evens = False
        """Whether all chunks of a prompt should have about the same length."""
        self.first_tokens = 0
        """Min tokens of the first chunk."""

    def take(self, start: int, remaining: int) -> int:
        """Return how many of the ``remaining`` tokens from ``start`` are computed now.

        The result is all of them, or ends at the end of a block, so that the block can be saved.
        The first call never returns 0."""
        policy = self._policy
        if not self._width:
            least = self._whole_blocks(min(self.first_tokens, self._tokens))
            tokens = int(min(self._tokens, policy.max_kernel_tokens(start)))
            most = min(remaining, max(tokens, self._min_tokens))
            tokens = max(self._fit_to_time(start, most), min(most, least))
            tokens = self._end_at_block(start, self._even(tokens, remaining), remaining)
            self._width = max(tokens, MIN_TOKENS)
            self._longest = tokens
            self._seconds -= policy.predict_s(start, tokens)
            self._tokens -= self._unshared_tokens
        else:
            tokens = self._fit_to_time(start, min(remaining, self._tokens))
            if tokens > 2 * self._width:
                return 0
            tokens = self._end_at_block(start, min(tokens, self._width), remaining)
            padded_s = policy.predict_s(start, max(tokens, self._longest))
            too_short = tokens < min(self._min_tokens, remaining)
            if too_short or self._width - tokens > max(tokens, MIN_TOKENS):
                return 0
            # Another pass for the short rest of a prompt costs more time than it saves.
            if padded_s > self._seconds + (self._spare_s if tokens == remaining else 0.0):
                return 0
            self._seconds -= padded_s
            self._longest = max(tokens, self._longest)
        self._tokens -= tokens
        return tokens

    def _fit_to_time(self, start: int, tokens: int) -> int:
        """Return how many of ``tokens`` fit into the time left, but no fewer than are worth a
        chunk. If only few would remain, return all of them: another pass over the weights costs
        more."""
        if self._policy.predict_s(start, tokens) <= self._seconds + self._spare_s / 2:
            return tokens
        return min(tokens, max(self._min_tokens, self._policy.tokens_within(start, self._seconds)))

    def _even(self, tokens: int, remaining: int) -> int:
        """Return the length of equal chunks, as many as ``tokens`` requires: a short last chunk
        would cost a whole pass over the weights."""
        if not self.evens:
            return tokens
        even = -(-remaining // -(-remaining // tokens))
        return min(tokens, self._whole_blocks(even))

    def _whole_blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size) * self._block_size

    def _end_at_block(self, start: int, tokens: int, remaining: int) -> int:
        beyond = (start + tokens) % self._block_size
        return tokens if tokens == remaining else max(0, tokens - beyond)
