"""What a replica needs for structured output, put together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import copy

from engine.executor.base import Executor
from engine.grammar.compiled import Vocabulary
from engine.grammar.compiler import Compiler, Outcome
from engine.grammar.gate import Gate
from engine.grammar.library import Library
from engine.model.load import LoadedModel
from engine.sampling.masks import Masking
from shared.wire import Grammar

logger = logging.getLogger(__name__)


def open_gate(
    loaded: LoadedModel, executor: Executor, on_done: Callable[[Grammar, Outcome], None]
) -> Gate:
    """The gate for requests to ``loaded``, and masks for ``executor``. ``on_done`` is called by
    threads with grammars and what became of them, for `Gate.compiled`."""
    try:
        vocabulary = vocabulary_of(loaded)
        tokenizer = vocabulary.load()
    except ValueError as error:
        logger.warning("structured output is not supported for this model: %s", error)
        return Gate(None, None)
    library = Library(tokenizer)
    executor.use_grammars(Masking(library, loaded.vocab_size))
    return Gate(Compiler(vocabulary, tokenizer, on_done), library)


def vocabulary_of(loaded: LoadedModel) -> Vocabulary:
    """Raises ValueError for a model whose tokenizer has no fast form, or that never ends."""
    backend = getattr(loaded.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("its tokenizer is not one of the tokenizers library")
    if not loaded.eos_token_ids:
        raise ValueError("it has no token that ends an answer")
    whole = copy(backend)
    whole.no_padding()
    whole.no_truncation()
    size = max(loaded.vocab_size, whole.get_vocab_size(with_added_tokens=True))
    return Vocabulary(whole.to_str(), size, list(loaded.eos_token_ids))
