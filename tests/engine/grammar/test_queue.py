"""Requests wait for their own grammars only."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count

import msgspec
import pytest
from llguidance import LLTokenizer

from engine.grammar import cache as grammar_cache
from engine.grammar import checker
from engine.grammar.cache import GrammarCache
from engine.grammar.checker import CheckerUnavailable, GrammarChecker
from engine.grammar.compiled import CompiledGrammar, GrammarError, TokenizerSpec, compile_grammar
from engine.grammar.compiler import CompileOutcome, GrammarCompiler
from engine.grammar.queue import GrammarQueue, ReadyRequest
from shared import wire
from tests.shared import submits

Outcomes = queue.SimpleQueue[tuple[wire.Grammar, CompileOutcome]]
DIGITS = wire.Grammar(kind="regex", source="[0-9]{2}", param="guided_regex")


def submit(name: str, grammar: wire.Grammar | None = DIGITS, attempt: int = 0) -> wire.Submit:
    return submits.submit(name, grammar=grammar, attempt=attempt)


class RecordingCompiler:
    """A compiler that only records the grammars it is given."""

    def __init__(self) -> None:
        self.grammars: list[wire.Grammar] = []

    def compile(self, grammar: wire.Grammar, group: str = "") -> None:
        self.grammars.append(grammar)

    def cancel(self, grammar: wire.Grammar) -> None:
        self.grammars.remove(grammar)

    def close(self) -> None:
        pass


@pytest.fixture
def recorder() -> RecordingCompiler:
    return RecordingCompiler()


@pytest.fixture
def grammar_queue(recorder: RecordingCompiler, tokenizer: LLTokenizer) -> GrammarQueue:
    return GrammarQueue(recorder, GrammarCache(tokenizer))


@pytest.fixture(scope="module")
def digits(tokenizer: LLTokenizer) -> CompiledGrammar:
    return compile_grammar(tokenizer, DIGITS)


def refusal(answer: ReadyRequest | wire.Refused | None) -> tuple[str, str | None]:
    """Return the reason of a refusal, and the field at fault."""
    assert isinstance(answer, wire.Refused)
    return answer.reason, answer.param


def names(answers: list[ReadyRequest | wire.Refused]) -> list[str]:
    return [v.request.request_id if isinstance(v, ReadyRequest) else v.request_id for v in answers]


def test_requests_without_a_grammar_pass_while_others_wait(grammar_queue: GrammarQueue) -> None:
    assert grammar_queue.add(submit("a")) is None
    passed = grammar_queue.add(submit("b", None))
    assert isinstance(passed, ReadyRequest) and passed.request.request_id == "b"
    assert [(live.request_id, live.accepted) for live in grammar_queue.live()] == [("a", False)]


def test_a_grammar_is_compiled_once_for_all_its_requests(
    grammar_queue: GrammarQueue, recorder: RecordingCompiler, digits: CompiledGrammar
) -> None:
    for name in "abc":
        assert grammar_queue.add(submit(name)) is None
    assert len(recorder.grammars) == 1
    answers = grammar_queue.on_compiled(recorder.grammars[0], digits)
    assert names(answers) == ["a", "b", "c"]
    assert all(isinstance(v, ReadyRequest) and v.grammar is digits for v in answers)
    assert isinstance(grammar_queue.add(submit("d")), ReadyRequest)
    assert len(recorder.grammars) == 1
    assert not list(grammar_queue.live())


def test_a_bad_grammar_is_refused_by_name_and_remembered(
    grammar_queue: GrammarQueue, recorder: RecordingCompiler
) -> None:
    grammar_queue.add(submit("a"))
    (refused,) = grammar_queue.on_compiled(DIGITS, GrammarError("it is bad"))
    again = grammar_queue.add(submit("b"))
    for answer in (refused, again):
        assert refusal(answer) == ("invalid", "guided_regex")
        assert isinstance(answer, wire.Refused) and "it is bad" in answer.message
    assert len(recorder.grammars) == 1


def test_a_bad_grammar_is_refused_with_each_requests_own_field(
    grammar_queue: GrammarQueue, recorder: RecordingCompiler
) -> None:
    """The same source may be in another field, or be a part there."""
    other = msgspec.structs.replace(DIGITS, param="response_format")
    part = msgspec.structs.replace(DIGITS, param="tools[1]")
    whole = wire.Grammar(kind="lark", source="start: x", param="tools", parts=[part])
    grammar_queue.add(submit("a"))
    grammar_queue.add(submit("b", other))
    grammar_queue.add(submit("c", whole))
    error = GrammarError("it is bad", source=DIGITS.source)
    found = [
        *grammar_queue.on_compiled(DIGITS, error),
        *grammar_queue.on_compiled(whole, error),
        grammar_queue.add(submit("d", other)),
    ]
    fields = {one.request_id: one.param for one in found if isinstance(one, wire.Refused)}
    expected = {"a": "guided_regex", "b": "response_format", "c": "tools[1]"}
    assert fields == expected | {"d": "response_format"}


@pytest.mark.parametrize(
    "outcome", [GrammarError("too slow", transient=True), CheckerUnavailable("no process")]
)
def test_transient_errors_are_not_remembered(
    grammar_queue: GrammarQueue, recorder: RecordingCompiler, outcome: CompileOutcome
) -> None:
    grammar_queue.add(submit("a"))
    (refused,) = grammar_queue.on_compiled(DIGITS, outcome)
    assert refusal(refused)[0] == ("invalid" if isinstance(outcome, GrammarError) else "full")
    assert grammar_queue.add(submit("a", attempt=1)) is None
    assert len(recorder.grammars) == 2


def test_aborted_and_superseded_requests_do_not_pass(
    grammar_queue: GrammarQueue, digits: CompiledGrammar
) -> None:
    for name in "abc":
        grammar_queue.add(submit(name))
    grammar_queue.abort("a", None)
    grammar_queue.abort("b", 1)  # another attempt
    grammar_queue.add(submit("c", attempt=1))
    answers = grammar_queue.on_compiled(DIGITS, digits)
    assert names(answers) == ["b", "c"]
    last = answers[1]
    assert isinstance(last, ReadyRequest) and last.request.attempt == 1
    grammar_queue.add(submit("d", wire.Grammar(kind="regex", source="x")))
    grammar_queue.clear()
    assert not list(grammar_queue.live())
    assert grammar_queue.on_compiled(wire.Grammar(kind="regex", source="x"), digits) == []


def test_a_grammar_is_cancelled_with_the_last_request_that_waits_for_it(
    grammar_queue: GrammarQueue, recorder: RecordingCompiler, digits: CompiledGrammar
) -> None:
    for name in "ab":
        grammar_queue.add(submit(name))
    grammar_queue.abort("a", None)
    assert recorder.grammars == [DIGITS]
    grammar_queue.abort("b", None)
    assert recorder.grammars == []
    grammar_queue.add(submit("c"))
    assert recorder.grammars == [DIGITS]
    grammar_queue.clear()
    assert recorder.grammars == []
    assert grammar_queue.on_compiled(DIGITS, digits) == []  # one that was on its way


def test_a_draining_engine_refuses_waiting_requests(grammar_queue: GrammarQueue) -> None:
    grammar_queue.add(submit("a"))
    (refused,) = grammar_queue.refuse_all()
    assert refused.reason == "draining"
    assert not list(grammar_queue.live())


def test_grammars_are_unsupported_with_a_tokenizer_that_llguidance_cannot_use() -> None:
    grammar_queue = GrammarQueue(None, None)
    assert isinstance(grammar_queue.add(submit("a", None)), ReadyRequest)
    assert refusal(grammar_queue.add(submit("b"))) == ("unsupported", "guided_regex")
    assert grammar_queue.capabilities == ()


def test_a_grammar_that_is_too_large_is_refused(grammar_queue: GrammarQueue) -> None:
    grammar = wire.Grammar(kind="regex", source="é" * (wire.MAX_GRAMMAR_BYTES // 2 + 1))
    assert refusal(grammar_queue.add(submit("a", grammar)))[0] == "too_large"


# -- the cache --------------------------------------------------------------------


def test_the_least_recently_used_grammar_is_dropped_unless_it_is_in_use(
    tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_cache, "CAPACITY", 2)
    cache = GrammarCache(tokenizer)
    grammars = [wire.Grammar(kind="regex", source=letter) for letter in "abcd"]
    held = cache.get(grammars[0])
    for grammar in grammars[1:]:
        cache.get(grammar)
    assert cache.find(grammars[0]) is held
    assert cache.find(grammars[1]) is None


def test_few_heavy_grammars_are_kept(
    tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_cache, "HEAVY_CAPACITY", 1)
    cache = GrammarCache(tokenizer)
    light = wire.Grammar(kind="regex", source="a")
    first, second = (wire.Grammar(kind="regex", source=c * 40_000) for c in "bc")
    for grammar in (light, first, second):
        cache.get(grammar)
    assert [cache.find(g) is None for g in (light, first, second)] == [False, True, False]


# -- the compiler -----------------------------------------------------------------


@pytest.fixture
def done() -> Outcomes:
    return Outcomes()


@pytest.fixture
def compiler(
    vocabulary: TokenizerSpec, tokenizer: LLTokenizer, done: Outcomes
) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(vocabulary, tokenizer, lambda *outcome: done.put(outcome))
    yield compiler
    compiler.close()


def slow_grammar(number: int) -> wire.Grammar:
    return wire.Grammar(kind="json_schema", source=f'{{"type":"integer","multipleOf":{number}}}')


def test_a_slow_grammar_does_not_delay_others(compiler: GrammarCompiler, done: Outcomes) -> None:
    for grammar in (slow_grammar(9999991), DIGITS, wire.Grammar(kind="regex", source="(")):
        compiler.compile(grammar)
    outcomes = {}
    for _ in range(2):
        grammar, outcome = done.get(timeout=60)
        outcomes[grammar.source] = outcome
    assert isinstance(outcomes["[0-9]{2}"], CompiledGrammar)
    assert isinstance(outcomes["("], GrammarError)
    assert done.empty()


def test_a_request_does_not_get_the_error_of_a_run_that_was_given_up(
    compiler: GrammarCompiler, done: Outcomes, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
    ends = queue.SimpleQueue[None](), queue.SimpleQueue[None]()
    numbers = count()

    def check(self: GrammarChecker, grammar: wire.Grammar, is_wanted: Callable[[], bool]) -> None:
        number = next(numbers)
        began.put(is_wanted)
        ends[number].get(timeout=60)
        if number == 0:
            raise GrammarError("compiling it takes longer than 10 s", transient=True)

    monkeypatch.setattr(GrammarChecker, "check", check)
    compiler.compile(DIGITS)
    is_first_wanted = began.get(timeout=60)
    compiler.cancel(DIGITS)
    compiler.compile(DIGITS)  # the client asks again while the first run ends
    is_second_wanted = began.get(timeout=60)
    assert (is_first_wanted(), is_second_wanted()) == (False, True)
    ends[0].put(None)
    ends[1].put(None)
    _, outcome = done.get(timeout=60)
    assert isinstance(outcome, CompiledGrammar)
    assert done.empty()


def test_slow_grammars_of_one_tenant_delay_no_other(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: queue.SimpleQueue[str] = queue.SimpleQueue()
    ends: dict[str, threading.Event] = defaultdict(threading.Event)

    def check(self: GrammarChecker, grammar: wire.Grammar, is_wanted: Callable[[], bool]) -> None:
        began.put(grammar.source)
        assert ends[grammar.source].wait(60)

    monkeypatch.setattr(GrammarChecker, "check", check)
    monkeypatch.setattr("engine.grammar.compiler.SLOW_S", 0.0)
    names = ["ann1", "ann2", "ann3", "ann4", "bob1", "ann5"]
    for name in names[:4]:
        compiler.compile(wire.Grammar(kind="regex", source=name), "ann")
    assert {began.get(timeout=60), began.get(timeout=60)} == {"ann1", "ann2"}
    compiler.compile(wire.Grammar(kind="regex", source="bob1"), "bob")
    compiler.compile(wire.Grammar(kind="regex", source="ann5"), "ann")
    compiler.compile(wire.Grammar(kind="regex", source="ann5"), "bob")
    ends["ann1"].set()
    assert began.get(timeout=60) == "bob1"  # before those of Ann that came first
    ends["bob1"].set()
    assert began.get(timeout=60) == "ann5"  # wanted by Bob too, and Ann has one thread now
    ends["ann2"].set()
    assert began.get(timeout=60) == "ann3"
    ends["ann5"].set()
    with pytest.raises(queue.Empty):
        began.get(timeout=0.2)
    ends["ann3"].set()
    assert began.get(timeout=60) == "ann4"
    ends["ann4"].set()


def test_grammars_that_nobody_waits_for_do_not_hold_up_others(
    compiler: GrammarCompiler, done: Outcomes
) -> None:
    slow = [slow_grammar(number) for number in (9999991, 9999973, 9999971, 9999943)]
    compiler.compile(DIGITS)
    assert done.get(timeout=60)[0] == DIGITS  # the processes run
    for grammar in slow:
        compiler.compile(grammar)
    time.sleep(0.2)
    for grammar in slow:
        compiler.cancel(grammar)
    compiler.compile(DIGITS)
    began = time.monotonic()
    grammar, outcome = done.get(timeout=60)
    assert grammar == DIGITS and isinstance(outcome, CompiledGrammar)
    assert time.monotonic() - began < 2 * checker.TIME_LIMIT_S
    assert done.empty()
