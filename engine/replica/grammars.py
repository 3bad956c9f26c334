"""The parts of a replica needed for structured output."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import copy

from engine.executor.base import Executor
from engine.executor.draft_model import DraftModel
from engine.grammar.cache import GrammarCache
from engine.grammar.compiled import TokenizerSpec
from engine.grammar.compiler import CompileOutcome, GrammarCompiler
from engine.grammar.queue import GrammarQueue
from engine.model.load import LoadedModel
from engine.sampling.masks import GrammarMasker
from shared.wire import Grammar

logger = logging.getLogger(__name__)


def open_grammar_queue(
    loaded: LoadedModel,
    executor: Executor,
    draft_model: DraftModel | None,
    on_done: Callable[[Grammar, CompileOutcome], None],
) -> GrammarQueue:
    """Return the queue for requests to ``loaded``; give ``executor`` and ``draft_model`` what makes
    masks.

    The compiler's threads call ``on_done`` with each grammar and its outcome, which are meant
    for `GrammarQueue.on_compiled`.
    """
    try:
        spec = tokenizer_spec_of(loaded)
        tokenizer = spec.load()
    except ValueError as error:
        logger.warning("structured output is not supported for this model: %s", error)
        return GrammarQueue(None, None)
    grammars = GrammarCache(tokenizer)
    executor.use_grammars(GrammarMasker(grammars, loaded.vocab_size))
    if draft_model is not None:
        draft_model.use_grammars(grammars)
    return GrammarQueue(GrammarCompiler(spec, tokenizer, on_done), grammars)


def tokenizer_spec_of(loaded: LoadedModel) -> TokenizerSpec:
    """Return its spec. Raises ValueError without a fast tokenizer or an end-of-answer token."""
    backend = getattr(loaded.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("its tokenizer is not a fast tokenizer")
    if not loaded.eos_token_ids:
        raise ValueError("it has no token that ends an answer")
    whole = backend
    if backend.padding or backend.truncation:
        whole = copy(backend)  # which takes as long as loading it
        whole.no_padding()
        whole.no_truncation()
    size = max(loaded.vocab_size, whole.get_vocab_size(with_added_tokens=True))
    return TokenizerSpec(whole.to_str(), size, list(loaded.eos_token_ids))
