"""One sequence's place in its grammar."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher

from engine.grammar.compiled import CompiledGrammar, GrammarError, raise_if_error


class GrammarMatcher:
    """Follows the outputs of one sequence.

    Where the grammar binds only from behind the tokens ``after``, it sleeps until they came.
    ``inner`` is None as long as it does.
    """

    def __init__(self, grammar: CompiledGrammar, after: Sequence[int] = ()) -> None:
        self._grammar = grammar
        self._after = list(after)
        self._outputs: list[int] = []
        self._woke_at = 0
        self.inner: LLMatcher | None = None
        if not self._after:
            self.inner = grammar.initial_matcher.deep_copy()

    @property
    def num_outputs(self) -> int:
        """How many it has followed."""
        return len(self._outputs)

    def advance(self, tokens: Sequence[int]) -> None:
        """Raises `GrammarError` for a token that is not allowed, and from then on."""
        for token in tokens:
            self._outputs.append(token)
            if self.inner is not None:
                self.inner.consume_token(token)
                raise_if_error(self.inner)
            elif self._outputs[-len(self._after) :] == self._after:
                self._woke_at = len(self._outputs)
                self.inner = self._grammar.initial_matcher.deep_copy()

    def rollback(self, count: int) -> None:
        """Takes the last ``count`` outputs back. Raises `GrammarError`."""
        if count == 0:
            return
        del self._outputs[-count:]
        if self.inner is None:
            return
        if self._after and len(self._outputs) < self._woke_at:
            self.inner = None
        elif not self.inner.rollback(count):
            raise_if_error(self.inner)
            raise GrammarError("it cannot go back")
