"""Finds the invalid part of a JSON schema, because llguidance does not always name it."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from llguidance import LLTokenizer

from engine.grammar.compiled import GrammarError, compile_grammar
from shared.bounded_schema import schemas_in
from shared.wire import Grammar

MAX_TRIES = 300


def locate(tokenizer: LLTokenizer, source: str, message: str) -> str:
    """Return the JSON pointer of the innermost part of ``source`` that by itself causes
    ``message``.

    It is empty for the schema as a whole, and if ``source`` is not JSON.
    """
    try:
        root = json.loads(source)
    except (ValueError, RecursionError):
        return ""
    definitions: dict[str, Any] = {}
    if isinstance(root, dict):
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    path, part, tries = "", root, 0
    while True:
        # First without definitions: with them, every part that refers to an invalid one fails too.
        for around, (step, inner) in product(({}, definitions), schemas_in(part)):
            if tries == MAX_TRIES:
                return path
            tries += 1
            tried = {**around, **inner} if isinstance(inner, dict) else inner
            if _message(tokenizer, tried) == message:
                path, part = path + step, inner
                break
        else:
            return path


def _message(tokenizer: LLTokenizer, schema: Any) -> str:
    try:
        compile_grammar(tokenizer, Grammar(kind="json_schema", source=json.dumps(schema)))
    except GrammarError as error:
        return str(error)
    return ""
