"""mlx-lm's own answer to a prompt, and whether another text is as right.

Two ways of computing a position round differently. So a text may part from the oracle's where
the oracle's two best tokens are nearly tied: their gap must be below four times the largest
difference between two ways in which the oracle itself computes that position, and for fp32 and
an unquantized cache never above 1e-3.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from engine.cache.quantization import Precision
from engine.proving.oracle import make_rounding_cache

MAX_GAP = 1e-3
EXACT = Precision()
GROUP_SIZE = 64


class Oracle:
    """A model as mlx-lm computes it.

    With ``kv_bits`` its cache is quantized by mlx-lm: with scales in the model's type, and from
    the second call on. With ``rounded`` it keeps keys and values as slots do: for `check_same`,
    and where mlx-lm has no kernel for heads as small as those of a tiny model.
    """

    def __init__(
        self,
        path: Path,
        adapter: Path | None = None,
        kv_bits: int | None = None,
        rounded: Precision = EXACT,
    ) -> None:
        self.kv_bits = kv_bits
        self._rounded = rounded
        adapter_path = None if adapter is None else str(adapter)
        self.model, self.tokenizer = mlx_lm.load(str(path), adapter_path=adapter_path)
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def chat(self, *contents: str) -> list[int]:
        """Return the token ids of a conversation, in which user and assistant alternate."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
        ids: list[int] = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return list(ids)

    def tokens(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Return the greedy continuation, including its end token if there is one."""
        key = tuple(prompt), max_tokens
        if key not in self._known:  # several tests may ask for the same
            stream = mlx_lm.stream_generate(
                self.model, self.tokenizer, prompt, max_tokens=max_tokens, kv_bits=self.kv_bits
            )
            self._known[key] = [response.token for response in stream]
        return self._known[key]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Return the next ``count`` tokens, even if one of them ends a turn."""
        cache: Any = make_prompt_cache(self.model)
        found: list[int] = []
        tokens = prompt
        while len(found) < count:
            logits = self.model(mx.array([tokens]), cache=cache)[0, -1]
            tokens = [int(mx.argmax(logits).item())]
            found += tokens
        return found

    def text(self, tokens: list[int]) -> str:
        """Return the text of ``tokens`` as the tokenizer decodes it, without a leading space, which
        mlx-lm drops. (Of a zero byte mlx-lm's own detokenizer makes the character U+0100.)"""
        kept = [token for token in tokens if token not in self.tokenizer.eos_token_ids]
        text = self.tokenizer.decode(kept, clean_up_tokenization_spaces=False)
        return str(text).removeprefix(" ")

    def check(self, prompt: list[int], max_tokens: int, text: str) -> None:
        """Check that ``text`` is the oracle's greedy text, or parts from it at a tie. mlx-lm drops
        a leading space, which completions keep."""
        expected = self.tokens(prompt, max_tokens)
        if not self.text(expected).startswith(" "):
            text = text.removeprefix(" ")
        if text == self.text(expected):
            return
        for count in range(1, len(expected) + 1):
            if not text.startswith(self.text(expected[:count]).rstrip("�")):
                break
        gap, noise = self._tie(prompt + expected[: count - 1])
        assert gap < min(4 * noise, self._max_gap), (
            f"{text!r} parts from {self.text(expected)!r} at token {count - 1}, "
            f"where the gap is {gap:.2e} and the noise {noise:.2e}"
        )

    def check_same(self, prompt: list[int], ours: list[int], theirs: list[int]) -> None:
        """Check that the two greedy continuations are equal, or part at a tie."""
        pairs = zip(ours, theirs, strict=False)
        count = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if count is None:
            assert len(ours) == len(theirs)
            return
        gap, noise = self._tie(prompt + ours[:count])
        assert gap < min(4 * noise, self._max_gap), (
            f"{ours} part from {theirs} at {count}: {gap:.2e}"
        )

    @property
    def _max_gap(self) -> float:
        exact = self.kv_bits is None and self._rounded == EXACT
        return MAX_GAP if exact else float("inf")

    def _tie(self, tokens: list[int]) -> tuple[float, float]:
        """Return the gap between the two best tokens after ``tokens``, and its noise."""
        at_once = self.model(mx.array([tokens]), cache=make_prompt_cache(self.model))[0, -1]
        cache = make_rounding_cache(self.model, self._rounded)
        for token in tokens:
            one_by_one = self.model(mx.array([[token]]), cache=cache)[0, -1]
            mx.eval(one_by_one)
            maybe_quantize_kv_cache(cache, 0, GROUP_SIZE, self.kv_bits)
        best = mx.sort(at_once)[-2:]
        return (best[1] - best[0]).item(), mx.max(mx.abs(at_once - one_by_one)).item()


@lru_cache(maxsize=2)
def oracle(path: Path, kv_bits: int | None = None) -> Oracle:
    return Oracle(path, kv_bits=kv_bits)
