"""Sequences with grammars, through scheduler and executor on tiny random models.

The output of such a model is noise, so any valid output shows that the grammar was enforced."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.backend.gpu_path import forced_gpu_path
from engine.executor.serial import SerialExecutor
from engine.grammar import cache as grammar_cache
from engine.proving.choose import ChosenExecutor
from engine.replica import build as replica
from shared import wire
from shared.wire import Grammar, SamplingParams
from tests.engine.whole import Whole
from tests.tiny_models import EOS

PATTERN = "[a-f]{3,6}-[0-9]{2}(, [A-Z]{1,4}){0,3}"
WORDS = Grammar(kind="regex", source=PATTERN)
HOT = SamplingParams(seed=3, temperature=1.5)
Build = Callable[..., Whole]


@pytest.fixture(scope="module")
def build(tiny_model: Callable[..., Path]) -> Build:
    """Return a function that makes an engine that takes grammars."""

    def make(kind: str = "llama", **settings: object) -> Whole:
        settings = {"block_size": 4, "no_ssd": True, "num_blocks": 400} | settings
        whole = Whole(tiny_model(kind), **settings)
        whole.use_grammars()
        return whole

    return make


@pytest.fixture(scope="module")
def engine(build: Build) -> Whole:
    return build()


@pytest.fixture
def whole(engine: Whole) -> Whole:
    """An engine in the state of a new one."""
    engine.renew(look_ahead=False)
    return engine


def ask(whole: Whole, name: str, length: int = 9, **fields: Any) -> None:
    fields = {"grammar": WORDS, "sampling": HOT, "stop_token_ids": [EOS], **fields}
    max_tokens = fields.pop("max_tokens", 60)
    seed = sum(map(ord, name))
    prompt = [3 + (seed * (i + 1)) % 250 for i in range(length)]
    whole.submit(name, prompt, max_tokens, **fields)


def text(whole: Whole, name: str) -> str:
    tokens = whole.texts[name]
    if whole.ends[name].stop_token is not None:
        tokens = tokens[:-1]
    decoded: str = whole.loaded.tokenizer.decode(tokens)
    return decoded


def serial_executor(model: Any, *_: object) -> ChosenExecutor:
    return ChosenExecutor(SerialExecutor(model, 512), "for this test")


def assert_bound(whole: Whole, *names: str) -> None:
    for name in names:
        assert whole.ends[name].finish == "stop", whole.ends[name]
        assert re.fullmatch(PATTERN, text(whole, name)), text(whole, name)


@pytest.mark.parametrize("kind", ["llama", "mamba", "gpt_oss"])
def test_an_answer_matches_its_grammar_and_ends_with_it(build: Build, kind: str) -> None:
    check_answers(build(kind))


def test_an_answer_matches_its_grammar_as_on_a_gpu(build: Build) -> None:
    with forced_gpu_path():
        engine = build(num_blocks=4000)
        assert engine.executor.spec.look_ahead
        check_answers(engine)


def check_answers(engine: Whole) -> None:
    for number in range(6):
        sampling = SamplingParams(seed=number, temperature=2.0)
        ask(engine, f"a{number}", 3 + 5 * number, sampling=sampling)
    ask(engine, "greedy", sampling=SamplingParams(seed=0))
    engine.run()
    assert_bound(engine, "greedy", *(f"a{number}" for number in range(6)))
    assert len({text(engine, f"a{number}") for number in range(6)}) > 1


@pytest.mark.parametrize("serial", [False, True])
def test_a_matcher_is_released_with_the_slot_of_its_sequence(
    build: Build, monkeypatch: pytest.MonkeyPatch, serial: bool
) -> None:
    if serial:
        monkeypatch.setattr(replica, "choose_executor", serial_executor)
    monkeypatch.setattr(grammar_cache, "CAPACITY", 0)  # only what is in use stays
    engine = build()
    assert isinstance(engine.executor, SerialExecutor) == serial
    ask(engine, "a")
    ask(engine, "b", 30)
    engine.run()
    assert_bound(engine, "a", "b")
    gc.collect()
    assert engine.grammars is not None and engine.grammars.find(WORDS) is None


@pytest.mark.usefixtures("nothing_reserved")
def test_a_preempted_sequence_continues_within_its_grammar(build: Build) -> None:
    pattern = "([a-f]{5}[0-9]{5}){8}"
    long = {"grammar": Grammar(kind="regex", source=pattern), "max_tokens": 120}
    crowd, alone = build(num_blocks=50), {}
    for name in "abcd":
        ask(crowd, name, 40, **long)
        crowd.run()
        alone[name] = crowd.texts[name]
        crowd.renew(look_ahead=False)
    for name in "abcd":
        ask(crowd, name, 40, **long)
    crowd.run()
    assert crowd.scheduler.stats().preemptions_total > 0
    assert crowd.texts == alone
    for name in "abcd":
        assert re.fullmatch(pattern, text(crowd, name))


@pytest.mark.parametrize("known", [1, 4, 9])
def test_a_request_that_lost_its_engine_continues_within_its_grammar(
    whole: Whole, known: int
) -> None:
    grammar = Grammar(kind="regex", source="[a-f]{12}")
    ask(whole, "a", grammar=grammar)
    whole.run()
    text = whole.texts["a"]
    whole.renew(look_ahead=False)
    ask(whole, "a", grammar=grammar, generated=text[:known], attempt=1)
    whole.run()
    assert whole.texts["a"] == text


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 40},
        {"stop_token_ids": []},  # ignore_eos
        {"min_tokens": 40, "stop_token_ids": []},
        {"min_tokens": 1},
    ],
)
def test_an_answer_ends_only_where_its_grammar_allows_or_demands_it(
    whole: Whole, fields: dict[str, Any]
) -> None:
    ask(whole, "a", **fields)
    whole.run()
    assert_bound(whole, "a")
    if "min_tokens" not in fields or fields["min_tokens"] > 1:
        # Nothing else ends it before it is as long as it can be.
        assert len(re.findall(", ", text(whole, "a"))) == 3


def test_every_sampling_parameter_works_with_a_grammar(whole: Whole) -> None:
    letters = dict.fromkeys(range(200, 300), 100.0)
    controls: dict[str, SamplingParams] = {
        "penalties": SamplingParams(
            seed=1, temperature=1, repetition_penalty=1.8, presence_penalty=2, frequency_penalty=2
        ),
        "bias": SamplingParams(seed=1, temperature=1, logit_bias=list(letters.items())),
        "xtc": SamplingParams(seed=1, temperature=1, xtc_probability=1, xtc_threshold=0.01),
        "filters": SamplingParams(seed=1, temperature=2, top_p=0.5, top_k=3, min_p=0.1),
        "one": SamplingParams(seed=1, temperature=2, top_k=1, xtc_probability=1, min_p=1),
        "cold": SamplingParams(seed=1, temperature=1e-7),
    }
    for name, sampling in controls.items():
        ask(whole, name, sampling=sampling)
    ask(whole, "scored", logprobs=3, prompt_logprobs=1)
    whole.run()
    assert_bound(whole, "scored", *controls)


def test_a_grammar_may_apply_behind_certain_tokens_only(whole: Whole) -> None:
    (mark,) = whole.loaded.tokenizer.encode("q")
    grammar = Grammar(kind="regex", source=PATTERN, after=[mark])
    sampling = SamplingParams(seed=5, temperature=1, logit_bias=[(mark, 4.0)])
    ask(whole, "a", grammar=grammar, sampling=sampling, max_tokens=400)
    whole.run()
    before, _, answer = text(whole, "a").partition("q")
    assert re.fullmatch(PATTERN, answer)
    assert before


def test_a_grammar_that_fails_ends_its_request_alone(whole: Whole) -> None:
    """Its source is valid, but its parser exceeds llguidance's limit at the second token."""
    many = ",".join(f'"k{i}":{{"type":"string"}}' for i in range(2000))
    source = f'{{"type":"object","properties":{{{many}}}}}'
    wide = Grammar(kind="json_schema", source=source, param="response_format")
    ask(whole, "wide", grammar=wide)
    ask(whole, "a")
    ask(whole, "free", grammar=None, max_tokens=12, stop_token_ids=[])
    whole.run()
    assert whole.ends["wide"].finish == "error"
    assert "items" in (whole.ends["wide"].error or "")
    assert whole.ends["wide"].param == "response_format"
    assert_bound(whole, "a")
    assert len(whole.texts["free"]) == 12


def test_a_token_outside_the_vocabulary_is_refused(whole: Whole) -> None:
    ask(whole, "a", grammar=wire.Grammar(kind="regex", source="a", after=[320]))
    whole.run()
    assert whole.refused["a"].param == "grammar"
