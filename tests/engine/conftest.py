from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from engine.grammar.compiled import TokenizerSpec
from engine.scheduler.timing.time_share import TimeShare
from tests.tiny_models import EOS, VOCAB_SIZE

Wrap = Callable[[Any, str], Callable[[Callable[..., Any]], Callable[..., Any]]]


@pytest.fixture
def wrap(monkeypatch: pytest.MonkeyPatch) -> Wrap:
    """Return a decorator, ``@wrap(owner, name)``: the function takes the place of what ``owner``
    has under ``name`` until the test ends, and gets that as its first argument."""

    def place(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        original = getattr(owner, name)

        def replace(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **fields: Any) -> Any:
                return function(original, *args, **fields)

            monkeypatch.setattr(owner, name, call)
            return function

        return replace

    return place


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def look_ahead(request: pytest.FixtureRequest) -> bool:
    """Whether steps are dispatched ahead of their results."""
    return bool(request.param)


@pytest.fixture
def nothing_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admit sequences without memory for their answers, and compute their prompts at once, so that
    they are preempted however long steps take."""
    monkeypatch.setattr("engine.scheduler.memory.RESERVED_TOKENS", 0)
    monkeypatch.setattr(TimeShare, "is_turn_of_prompts", lambda share, stretch_s: True)


@pytest.fixture(scope="session")
def llama(tiny_model: Callable[..., Path]) -> Path:
    """The directory of a tiny model with plain attention."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def vocabulary(llama: Path) -> TokenizerSpec:
    text = (llama / "tokenizer.json").read_text()
    return TokenizerSpec(text, VOCAB_SIZE, [EOS])


@pytest.fixture(scope="session")
def tokenizer(vocabulary: TokenizerSpec) -> LLTokenizer:
    return vocabulary.load()
