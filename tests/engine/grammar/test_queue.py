"""Requests wait for their grammars, and for nothing else."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest
from llguidance import LLTokenizer

from engine.grammar import library as libraries
from engine.grammar.cache import GrammarCache
from engine.grammar.checker import CheckerUnavailable
from engine.grammar.compiled import CompiledGrammar, GrammarError, TokenizerSpec, compile_grammar
from engine.grammar.compiler import CompileOutcome, GrammarCompiler
from engine.grammar.queue import GrammarQueue, ReadyRequest
from shared import wire

DIGITS = wire.Grammar(kind="regex", source="[0-9]{2}", param="guided_regex")


def submit(name: str, grammar: wire.Grammar | None = DIGITS, attempt: int = 0) -> wire.Submit:
    return wire.Submit(
        request_id=name,
        attempt=attempt,
        token_ids=[1],
        sampling=wire.Sampling(seed=0),
        max_tokens=4,
        stop_token_ids=[],
        grammar=grammar,
    )


class Asked:
    """Stands where the compiler does, and only notes what it is asked for."""

    def __init__(self) -> None:
        self.grammars: list[wire.Grammar] = []

    def compile(self, grammar: wire.Grammar) -> None:
        self.grammars.append(grammar)

    def close(self) -> None:
        pass


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def gate(asked: Asked, tokenizer: LLTokenizer) -> GrammarQueue:
    return GrammarQueue(asked, GrammarCache(tokenizer))


@pytest.fixture(scope="module")
def digits(tokenizer: LLTokenizer) -> CompiledGrammar:
    return compile_grammar(tokenizer, DIGITS)


def names(verdicts: list[ReadyRequest | wire.Refused]) -> list[str]:
    return [v.request.request_id if isinstance(v, ReadyRequest) else v.request_id for v in verdicts]


def test_those_without_a_grammar_pass_while_others_wait(gate: GrammarQueue) -> None:
    assert gate.add(submit("a")) is None
    passed = gate.add(submit("b", None))
    assert isinstance(passed, ReadyRequest) and passed.request.request_id == "b"
    assert [(live.request_id, live.accepted) for live in gate.live()] == [("a", False)]


def test_a_grammar_is_compiled_once_for_all_who_have_it(
    gate: GrammarQueue, asked: Asked, digits: CompiledGrammar
) -> None:
    for name in "abc":
        assert gate.add(submit(name)) is None
    assert len(asked.grammars) == 1
    verdicts = gate.on_compiled(asked.grammars[0], digits)
    assert names(verdicts) == ["a", "b", "c"]
    assert all(isinstance(v, ReadyRequest) and v.grammar is digits for v in verdicts)
    assert isinstance(gate.add(submit("d")), ReadyRequest)
    assert len(asked.grammars) == 1
    assert not list(gate.live())


def test_a_bad_grammar_is_refused_by_name_and_remembered(gate: GrammarQueue, asked: Asked) -> None:
    gate.add(submit("a"))
    (refused,) = gate.on_compiled(DIGITS, GrammarError("it is bad"))
    again = gate.add(submit("b"))
    for refusal in (refused, again):
        assert isinstance(refusal, wire.Refused)
        assert (refusal.reason, refusal.param) == ("invalid", "guided_regex")
        assert "it is bad" in refusal.message
    assert len(asked.grammars) == 1


@pytest.mark.parametrize(
    "outcome", [GrammarError("too slow", transient=True), CheckerUnavailable("no process")]
)
def test_what_may_come_out_otherwise_is_tried_again(
    gate: GrammarQueue, asked: Asked, outcome: CompileOutcome
) -> None:
    gate.add(submit("a"))
    (refused,) = gate.on_compiled(DIGITS, outcome)
    assert isinstance(refused, wire.Refused)
    assert refused.reason == ("invalid" if isinstance(outcome, GrammarError) else "full")
    assert gate.add(submit("a", attempt=1)) is None
    assert len(asked.grammars) == 2


def test_who_is_gone_does_not_pass(gate: GrammarQueue, digits: CompiledGrammar) -> None:
    for name in "abc":
        gate.add(submit(name))
    gate.abort("a", None)
    gate.abort("b", 1)  # another attempt
    gate.add(submit("c", attempt=1))
    verdicts = gate.on_compiled(DIGITS, digits)
    assert names(verdicts) == ["b", "c"]
    assert verdicts[1].request.attempt == 1
    gate.add(submit("d", wire.Grammar(kind="regex", source="x")))
    gate.clear()
    assert not list(gate.live())
    assert gate.on_compiled(wire.Grammar(kind="regex", source="x"), digits) == []


def test_a_draining_engine_refuses_those_who_wait(gate: GrammarQueue) -> None:
    gate.add(submit("a"))
    (refused,) = gate.refuse_all()
    assert refused.reason == "draining"
    assert not list(gate.live())


def test_without_a_tokenizer_that_it_knows_a_grammar_is_unsupported() -> None:
    gate = GrammarQueue(None, None)
    assert isinstance(gate.add(submit("a", None)), ReadyRequest)
    refused = gate.add(submit("b"))
    assert isinstance(refused, wire.Refused)
    assert (refused.reason, refused.param) == ("unsupported", "guided_regex")
    assert gate.capabilities == ()


def test_a_grammar_that_is_too_large_is_refused(gate: GrammarQueue) -> None:
    grammar = wire.Grammar(kind="regex", source="é" * (wire.MAX_GRAMMAR_BYTES // 2 + 1))
    refused = gate.add(submit("a", grammar))
    assert isinstance(refused, wire.Refused) and refused.reason == "too_large"


# -- the library ------------------------------------------------------------------


def test_what_was_not_used_for_long_goes_unless_somebody_holds_it(
    tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "CAPACITY", 2)
    library = GrammarCache(tokenizer)
    grammars = [wire.Grammar(kind="regex", source=letter) for letter in "abcd"]
    held = library.get(grammars[0])
    for grammar in grammars[1:]:
        library.get(grammar)
    assert library.find(grammars[0]) is held
    assert library.find(grammars[1]) is None


def test_few_of_those_that_hold_much_are_kept(
    tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "HEAVY_CAPACITY", 1)
    library = GrammarCache(tokenizer)
    light = wire.Grammar(kind="regex", source="a")
    first, second = (wire.Grammar(kind="regex", source=c * 40_000) for c in "bc")
    for grammar in (light, first, second):
        library.get(grammar)
    assert [library.find(g) is None for g in (light, first, second)] == [False, True, False]


# -- the compiler -----------------------------------------------------------------


@pytest.fixture
def done() -> queue.SimpleQueue[tuple[wire.Grammar, CompileOutcome]]:
    return queue.SimpleQueue()


@pytest.fixture
def compiler(
    vocabulary: TokenizerSpec,
    tokenizer: LLTokenizer,
    done: queue.SimpleQueue[tuple[wire.Grammar, CompileOutcome]],
) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(vocabulary, tokenizer, lambda *outcome: done.put(outcome))
    yield compiler
    compiler.close()


def test_a_grammar_that_takes_minutes_holds_up_no_other(
    compiler: GrammarCompiler, done: queue.SimpleQueue[tuple[wire.Grammar, CompileOutcome]]
) -> None:
    slow = wire.Grammar(kind="json_schema", source='{"type":"integer","multipleOf":9999991}')
    bad = wire.Grammar(kind="regex", source="(")
    for grammar in (slow, DIGITS, bad):
        compiler.compile(grammar)
    outcomes = {}
    for _ in range(2):
        grammar, outcome = done.get(timeout=60)
        outcomes[grammar.source] = outcome
    assert isinstance(outcomes["[0-9]{2}"], CompiledGrammar)
    assert isinstance(outcomes["("], GrammarError)
    assert done.empty()
