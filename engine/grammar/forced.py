"""Drafts with grammars: text that a grammar forces is proposed as a draft, a draft model samples
only what it allows, and drafts that it rejects are not verified."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.grammar.compiled import CompiledGrammar, GrammarError
from engine.grammar.matcher import GrammarMatcher
from engine.speculation.source import DraftSource, Proposal
from shared.wire import Submit

LIKELY = 0.8
"""The text is certain, but the model may write it with other tokens."""


class ForcedSource(DraftSource):
    """Follows the outputs with its own matcher, because the executor's may be ahead or behind."""

    SOURCE = "grammar"

    def __init__(self, matcher: GrammarMatcher, num_prompt_tokens: int, proposes: bool) -> None:
        self._matcher: GrammarMatcher | None = matcher
        self._followed = num_prompt_tokens
        self._proposes = proposes

    @classmethod
    def of(cls, request: Submit, grammar: object, proposes: bool = True) -> ForcedSource | None:
        """Return the source of ``request``. None without a ``grammar``, or if a second matcher
        might take a hundred megabytes. Even if it proposes nothing itself, it tells which drafts of
        other sources are possible."""
        if request.grammar is None or not isinstance(grammar, CompiledGrammar) or grammar.heavy:
            return None
        matcher = GrammarMatcher(grammar, request.grammar.after)
        return cls(matcher, len(request.token_ids), proposes)

    def propose(self, tokens: Sequence[int], count: int) -> Proposal | None:
        if self._matcher is None:
            return None
        try:
            self._matcher.advance(tokens[self._followed :])
            self._followed = len(tokens)
            began = time.thread_time()
            forced = tuple(self._matcher.forced_tokens()) if self._proposes else ()
            self._matcher.mask_time.add(time.thread_time() - began)
        except GrammarError:  # the executor will report the error too
            self._matcher = None
            return None
        return Proposal(forced[:count], self.SOURCE, likely=(LIKELY,)) if forced else None

    def matcher(self) -> GrammarMatcher | None:
        return self._matcher

    def num_possible(self, drafts: Sequence[int]) -> int:
        if self._matcher is None or self._matcher.inner is None:
            return len(drafts)
        possible: int = self._matcher.inner.validate_tokens(list(drafts))
        return possible
