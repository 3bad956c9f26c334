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

from engine.adapters.queue import AdapterQueue
from engine.grammar import cache as grammar_cache
from engine.grammar import checker
from engine.grammar.cache import GrammarCache
from engine.grammar.checker import CheckerUnavailable, GrammarChecker
from engine.grammar.compiled import CompiledGrammar, GrammarError, TokenizerSpec, compile_grammar
from engine.grammar.compiler import CompileOutcome, GrammarCompiler
from engine.grammar.queue import GrammarQueue
from engine.intake import Intake
from engine.scheduler import Scheduler
from shared import wire
from tests.engine.scheduler.harness import config
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
def intake(recorder: RecordingCompiler, tokenizer: LLTokenizer) -> Intake:
    return intake_with(GrammarQueue(recorder, GrammarCache(tokenizer)))


def intake_with(grammars: GrammarQueue) -> Intake:
    return Intake(Scheduler(config()), grammars, AdapterQueue(None, None))


@pytest.fixture(scope="module")
def digits(tokenizer: LLTokenizer) -> CompiledGrammar:
    return compile_grammar(tokenizer, DIGITS)


def answers(intake: Intake, *names: str) -> dict[str, wire.Accepted | wire.Refused]:
    """Submit requests for digits with these names. Return all new answers, by request."""
    for name in names:
        intake.submit(submit(name))
    sent = intake.scheduler.take_outputs().messages
    return {one.request_id: one for one in sent if isinstance(one, wire.Accepted | wire.Refused)}


def refusal(answer: wire.Accepted | wire.Refused) -> tuple[str, str | None]:
    """Return the reason of a refusal, and the field at fault."""
    assert isinstance(answer, wire.Refused)
    return answer.reason, answer.param


def is_accepted(intake: Intake) -> dict[str, bool]:
    return {one.request_id: one.accepted for one in intake.scheduler.live()}


def test_requests_without_a_grammar_pass_while_others_wait(intake: Intake) -> None:
    intake.submit(submit("a"))
    intake.submit(submit("b", None))
    assert answers(intake).keys() == {"b"}
    assert is_accepted(intake) == {"a": False, "b": True}


def test_a_grammar_is_compiled_once_for_all_its_requests(
    intake: Intake, recorder: RecordingCompiler, digits: CompiledGrammar
) -> None:
    assert not answers(intake, *"abc")
    assert len(recorder.grammars) == 1
    intake.on_compiled(recorder.grammars[0], digits)
    assert list(answers(intake)) == ["a", "b", "c"]
    assert all(seq.grammar is digits for seq in intake.scheduler.sequences.live.values())
    assert answers(intake, "d").keys() == {"d"}
    assert len(recorder.grammars) == 1 and all(is_accepted(intake).values())


def test_a_bad_grammar_is_refused_by_name_and_remembered(
    intake: Intake, recorder: RecordingCompiler
) -> None:
    intake.submit(submit("a"))
    intake.on_compiled(DIGITS, GrammarError("it is bad"))
    for answer in answers(intake, "b").values():
        assert refusal(answer) == ("invalid", "guided_regex")
        assert isinstance(answer, wire.Refused) and "it is bad" in answer.message
    assert len(recorder.grammars) == 1 and not is_accepted(intake)


def test_a_bad_grammar_is_refused_with_each_requests_own_field(intake: Intake) -> None:
    """The same source may be in another field, or be a part there."""
    other = msgspec.structs.replace(DIGITS, param="response_format")
    part = msgspec.structs.replace(DIGITS, param="tools[1]")
    whole = wire.Grammar(kind="lark", source="start: x", param="tools", parts=[part])
    intake.submit(submit("a"))
    intake.submit(submit("b", other))
    intake.submit(submit("c", whole))
    error = GrammarError("it is bad", source=DIGITS.source)
    intake.on_compiled(DIGITS, error)
    intake.on_compiled(whole, error)
    intake.submit(submit("d", other))
    fields = {name: refusal(answer)[1] for name, answer in answers(intake).items()}
    expected = {"a": "guided_regex", "b": "response_format", "c": "tools[1]"}
    assert fields == expected | {"d": "response_format"}


@pytest.mark.parametrize(
    "outcome", [GrammarError("too slow", transient=True), CheckerUnavailable("no process")]
)
def test_transient_errors_are_not_remembered(
    intake: Intake, recorder: RecordingCompiler, outcome: CompileOutcome
) -> None:
    intake.submit(submit("a"))
    intake.on_compiled(DIGITS, outcome)
    (refused,) = answers(intake).values()
    assert refusal(refused)[0] == ("invalid" if isinstance(outcome, GrammarError) else "full")
    intake.submit(submit("a", attempt=1))
    assert not answers(intake) and len(recorder.grammars) == 2


def test_aborted_and_superseded_requests_do_not_pass(
    intake: Intake, digits: CompiledGrammar
) -> None:
    answers(intake, *"abc")
    scheduler = intake.scheduler
    scheduler.abort("a")
    scheduler.abort("b", 1)  # another attempt
    intake.submit(submit("c", attempt=1))
    intake.on_compiled(DIGITS, digits)
    accepted = answers(intake)
    assert list(accepted) == ["b", "c"] and accepted["c"].attempt == 1
    other = wire.Grammar(kind="regex", source="x")
    intake.submit(submit("d", other))
    scheduler.drop({("b", 0), ("c", 1), ("d", 0)})
    intake.on_compiled(other, digits)
    assert not answers(intake) and not is_accepted(intake)
    scheduler.check_integrity()


def test_a_grammar_is_cancelled_with_the_last_request_that_waits_for_it(
    intake: Intake, recorder: RecordingCompiler, digits: CompiledGrammar
) -> None:
    def abort(name: str) -> list[wire.Grammar]:
        intake.scheduler.abort(name)
        intake.grammars.cancel_abandoned()
        return recorder.grammars

    answers(intake, *"ab")
    assert abort("a") == [DIGITS] and abort("b") == []
    answers(intake, "c")
    assert recorder.grammars == [DIGITS] and abort("c") == []
    intake.on_compiled(DIGITS, digits)  # one that was on its way
    assert not answers(intake)


def test_a_draining_engine_refuses_waiting_requests(intake: Intake) -> None:
    answers(intake, "a")
    intake.scheduler.drain()
    assert refusal(answers(intake)["a"])[0] == "draining"
    assert intake.scheduler.idle


def test_requests_that_wait_count_among_those_of_the_engine(intake: Intake) -> None:
    most = intake.scheduler.config.max_sequences
    waiting = [str(number) for number in range(most)]
    assert not answers(intake, *waiting)
    intake.submit(submit("one more", None))
    assert refusal(answers(intake)["one more"])[0] == "full"


def test_a_prompt_that_fits_no_more_once_its_grammar_is_compiled_is_refused(
    intake: Intake, digits: CompiledGrammar
) -> None:
    scheduler = intake.scheduler
    prompt = [1] * (min(scheduler.config.context_length, scheduler.memory.capacity) - 2)
    intake.submit(submits.submit("a", prompt, grammar=DIGITS))
    assert not answers(intake)
    scheduler.submit(submit("b", None))
    while scheduler.memory.capacity > len(prompt):
        scheduler.schedule()
        scheduler.recover("no memory", out_of_memory=True)
    assert refusal(answers(intake)["a"])[0] == "too_large"
    intake.on_compiled(DIGITS, digits)
    assert "a" not in is_accepted(intake)


def test_grammars_are_unsupported_with_a_tokenizer_that_llguidance_cannot_use() -> None:
    intake = intake_with(GrammarQueue(None, None))
    intake.submit(submit("b", None))
    found = answers(intake, "a")
    assert isinstance(found["b"], wire.Accepted)
    assert refusal(found["a"]) == ("unsupported", "guided_regex")
    assert intake.grammars.capabilities == ()


def test_a_grammar_that_is_too_large_is_refused(intake: Intake) -> None:
    grammar = wire.Grammar(kind="regex", source="é" * (wire.MAX_GRAMMAR_BYTES // 2 + 1))
    intake.submit(submit("a", grammar))
    assert refusal(answers(intake)["a"])[0] == "too_large"


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
