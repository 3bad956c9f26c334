"""The intake of a replica's requests, and what its structured output needs."""

from __future__ import annotations

import logging
from copy import copy

from engine.adapters.queue import AdapterQueue
from engine.executor.base import Executor
from engine.executor.draft_model import DraftModel
from engine.grammar.cache import GrammarCache
from engine.grammar.compiled import TokenizerSpec
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.queue import GrammarQueue
from engine.intake import Intake
from engine.io.inbox import GrammarCompiled, Inbox
from engine.model.load import LoadedModel
from engine.replica.build import Replica
from engine.sampling.masks import GrammarMasker

logger = logging.getLogger(__name__)


def open_intake(loaded: LoadedModel, replica: Replica, inbox: Inbox) -> Intake:
    """Return the intake of ``replica``. Its threads put their results into ``inbox``."""
    grammars = open_grammar_queue(loaded, replica.executor, replica.draft_model, inbox)
    adapters = replica.adapters
    queue = adapters.open_queue(inbox.put) if adapters else AdapterQueue(None, None)
    return Intake(replica.scheduler, grammars, queue)


def open_grammar_queue(
    loaded: LoadedModel, executor: Executor, draft_model: DraftModel | None, inbox: Inbox
) -> GrammarQueue:
    """Return the queue for requests to ``loaded``; give ``executor`` and ``draft_model`` what makes
    masks."""
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
    compiler = GrammarCompiler(spec, tokenizer, lambda *done: inbox.put(GrammarCompiled(*done)))
    return GrammarQueue(compiler, grammars)


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
