"""The position of one sequence in its grammar."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher

from engine.grammar.compiled import CompiledGrammar, GrammarError, MaskTime, raise_if_error
from engine.grammar.forced_text import ForcedText


class GrammarMatcher:
    """Follows the outputs of one sequence.

    With ``after``, the grammar applies only to the outputs that follow these tokens.
    """

    def __init__(self, grammar: CompiledGrammar, after: Sequence[int] = ()) -> None:
        self._grammar = grammar
        self._forced = ForcedText(grammar.tokenizer)
        self._after = list(after)
        self._outputs: list[int] = []
        self._applies_from = 0
        self.inner: LLMatcher | None = None
        """llguidance's matcher; None until the grammar applies."""
        if not self._after:
            self.inner = grammar.initial_matcher.deep_copy()

    @property
    def mask_time(self) -> MaskTime:
        """The time of the masks of all sequences with its grammar."""
        return self._grammar.mask_time

    @property
    def num_outputs(self) -> int:
        """The number of outputs it has followed."""
        return len(self._outputs)

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow ``tokens``. Raises `GrammarError` at a forbidden token, and from then on, and if
        the grammar is too slow."""
        began = time.thread_time()
        for token in tokens:
            self._outputs.append(token)
            if self.inner is not None:
                self._forced.advance(token)
                self.inner.consume_token(token)
                raise_if_error(self.inner)
            elif self._outputs[-len(self._after) :] == self._after:
                self._applies_from = len(self._outputs)
                self.inner = self._grammar.initial_matcher.deep_copy()
        self.mask_time.add(time.thread_time() - began, len(tokens))

    def forced_token(self, mask: Any) -> int | None:
        """Return the only token that should follow, of the several that ``mask`` (words,) allows
        now, because the tokenizer would choose it for a text that the grammar forces."""
        return None if self.inner is None else self._forced.token(mask, self.inner, self._before)

    def forced_tokens(self) -> list[int]:
        """Return the tokens of the text that the grammar forces next, as far as it is known."""
        return [] if self.inner is None else self._forced.tokens(self.inner, self._before)

    @property
    def _before(self) -> list[int]:
        """The last output to which the grammar applies."""
        return self._outputs[max(self._applies_from, self.num_outputs - 1) :]

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` outputs. Raises `GrammarError`."""
        if count == 0:
            return
        del self._outputs[-count:]
        self._forced.clear()
        if self.inner is None:
            return
        if self._after and len(self._outputs) < self._applies_from:
            self.inner = None
        elif not self.inner.rollback(count):
            raise_if_error(self.inner)
            raise GrammarError("cannot go back")

    def return_to(self, count: int) -> None:
        """Undo all outputs except the first ``count``, even after an error. Raises
        `GrammarError`."""
        try:
            self.rollback(self.num_outputs - count)
        except GrammarError:
            self.begin_again(count)

    def begin_again(self, count: int) -> None:
        """Follow the first ``count`` outputs again, which is the only way back from an error.
        Raises `GrammarError`."""
        outputs = self._outputs[:count]
        self._outputs, self._applies_from = [], 0
        self._forced.clear()
        self.inner = None if self._after else self._grammar.initial_matcher.deep_copy()
        self.advance(outputs)
