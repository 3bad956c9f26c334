"""Drafts on whole engines: the text is the one without them, whatever is proposed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from engine.backend.gpu_path import forced_gpu_path
from engine.plan import Decode, Slot
from engine.proving.oracle import logits_distance
from shared import wire
from shared.wire import Grammar, SamplingParams, ThinkingBudget
from tests.engine.guesses import guessing
from tests.engine.whole import Whole
from tests.oracle import Oracle
from tests.tiny_models import EOS, VOCAB_SIZE

RIGHT, MIXED, WRONG = 0.0, 0.3, 1.0
"""How often a draft is wrong."""
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": SamplingParams(seed=1)},
    "sampled": {"sampling": SamplingParams(seed=2, temperature=0.9, top_p=0.9), "logprobs": 2},
    "penalized": {
        "sampling": SamplingParams(
            seed=3,
            temperature=0.7,
            repetition_penalty=1.3,
            presence_penalty=0.4,
            frequency_penalty=0.2,
            logit_bias=[(9, 2.0)],
        )
    },
    "scored": {"sampling": SamplingParams(seed=4), "logprobs": 3, "prompt_logprobs": 1},
    "short": {"min_tokens": 7, "stop_token_ids": list(range(0, VOCAB_SIZE, 5))},
    "bound": {
        "sampling": SamplingParams(seed=6, temperature=1.2),
        "grammar": Grammar(kind="regex", source="([a-f]{3,6}-[0-9]{2}, ){4,6}"),
        "stop_token_ids": [EOS],
    },
    "thinking": {"thinking": ThinkingBudget(tokens=9, end_ids=[30, 31], is_open=True)},
}
GUESSES = {
    "greedy": MIXED,
    "sampled": RIGHT,
    "penalized": MIXED,
    "scored": WRONG,
    "short": RIGHT,
    "bound": MIXED,
    "thinking": RIGHT,
}
TOKENS = 24


def prompt(name: str, longest: int = 60) -> list[int]:
    """Return a prompt of its own length, longer than a window for some."""
    seed = sum(map(ord, name))
    return [3 + (seed * (i + 1)) % 250 for i in range(seed % longest + 1)]


def start(whole: Whole, *names: str, tokens: int = TOKENS) -> None:
    for name in names:
        whole.submit(name, prompt(name), tokens, **REQUESTS[name])


class Engine:
    """A whole engine with the texts that it gives without drafts, to each request alone where they
    have the same bits in every batch, and else to all at once."""

    def __init__(self, path: Path, **settings: Any) -> None:
        given = {"block_size": 4, "no_ssd": True, "num_blocks": 400} | settings
        self.whole = Whole(path, **given)
        self.whole.use_grammars()
        self.expected: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[wire.TokenLogprobs]] = {}
        names = [(name,) for name in REQUESTS]
        for together in names if self.whole.executor.deterministic else [tuple(REQUESTS)]:
            self.renew()
            self.run(*together)
            self.expected |= self.whole.texts
            self.logprobs |= self.whole.logprobs

    def renew(self, drafts: bool = False, look_ahead: bool = False, **config: Any) -> None:
        """Begin anew, with `GUESSES` as drafts or without."""
        speculator = None
        if drafts:
            speculator = guessing(
                lambda sent: prompt(sent.request_id) + self.expected[sent.request_id],
                GUESSES,
                vocabulary=VOCAB_SIZE,
            )
        self.whole.renew(look_ahead, speculator, **config)

    def run(self, *names: str) -> None:
        start(self.whole, *names)
        self.whole.run()

    def check(self) -> None:
        """Check texts and log-probabilities: their bits where the engine promises them."""
        tolerance = 0.0 if self.whole.executor.deterministic else 2e-4
        for name, tokens in self.whole.texts.items():
            assert tokens == self.expected[name], name
            for ours, theirs in zip(self.whole.logprobs[name], self.logprobs[name], strict=True):
                assert ours.top_ids == theirs.top_ids or tolerance
                scores = pytest.approx([theirs.chosen, *theirs.top], abs=tolerance, rel=0)
                assert [ours.chosen, *ours.top] == scores


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[..., Path]) -> Callable[..., Engine]:
    """Return a function that makes an engine once of each kind. Plain ones promise the same bits,
    except as on a GPU. Blocks of the others are long, since snapshots of state belong to them."""

    @cache
    def make(kind: str, on_gpu_path: bool = False, **settings: Any) -> Engine:
        is_plain = kind in ("llama", "gemma3")
        made = Engine(tiny_model(kind), **{"block_size": 4 if is_plain else 16} | settings)
        assert made.whole.executor.deterministic or on_gpu_path or not is_plain
        return made

    return make


@pytest.fixture
def one(engine: Callable[..., Engine], request: pytest.FixtureRequest) -> Engine:
    """An engine of the kind that the test names, or with plain attention."""
    return engine(getattr(request, "param", "llama"))


def of_kinds(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("one", kinds, indirect=True)


def assert_lossless(engine: Engine, **config: Any) -> None:
    engine.renew(drafts=True, **config)
    engine.run(*REQUESTS)
    engine.check()
    counts = engine.whole.drafts["guesses"]
    assert 20 < counts.accepted < counts.drafted - 10


def test_in_8_bits_texts_and_scores_are_exactly_those_without_drafts(
    engine: Callable[..., Engine],
) -> None:
    assert_lossless(engine("llama", kv_bits=8, kv_group_size=16))


class Accepted:
    """The logits after each accepted draft, by the seed of its request and its position."""

    def __init__(self, texts: dict[int, list[int]]) -> None:
        self._texts = texts  # of each request, by its seed, with its prompt
        self.logits: dict[tuple[int, int], mx.array] = {}

    def observe(self, rows: Sequence[Decode], logits: mx.array) -> None:
        is_right: dict[Slot, bool] = {}
        for row, found in zip(rows, logits, strict=True):
            seed, position = row.sampling.seed, row.position
            if row.slot not in is_right:  # the input, which is no draft
                is_right[row.slot] = True
                continue
            text = self._texts.get(seed, [])
            is_right[row.slot] &= text[position : position + 1] == [row.token_id]
            if is_right[row.slot]:
                self.logits[seed, position] = found


@of_kinds("llama", "gemma3", "deepseek_v2", "mamba", "jamba", "gpt_oss")
def test_texts_are_those_without_drafts_and_logits_after_accepted_ones_the_oracles(
    one: Engine,
) -> None:
    """Full attention, a window shorter than the texts, latents, recurrent state, a hybrid, and
    sinks."""
    seeds = {
        fields["sampling"].seed: name for name, fields in REQUESTS.items() if "sampling" in fields
    }
    texts = {seed: prompt(name) + one.expected[name] for seed, name in seeds.items()}
    accepted = Accepted(texts)
    one.whole.executor.logits_observer = accepted.observe
    assert_lossless(one)
    one.whole.executor.logits_observer = None
    assert len(accepted.logits) > 10
    model = Oracle(one.whole.loaded.path).model
    for seed, text in texts.items():
        expected = model(mx.array([text]), cache=make_prompt_cache(model))[0]
        for (of, position), found in accepted.logits.items():
            if of == seed:
                assert logits_distance(found, expected[position]) < 1e-4


@pytest.mark.parametrize("kind", ["gemma3", "jamba"])
def test_texts_on_the_path_of_a_gpu_are_those_without_drafts(
    engine: Callable[..., Engine], kind: str
) -> None:
    with forced_gpu_path():
        assert_lossless(engine(kind, on_gpu_path=True), look_ahead=True)


@of_kinds("llama", "jamba")
@pytest.mark.usefixtures("nothing_reserved")
def test_sequences_that_lose_their_slots_go_on_as_without_drafts(one: Engine) -> None:
    config = one.whole.replica.scheduler.config
    pages = 2 if config.state_bytes else 3
    one.renew(
        drafts=True,
        limit_bytes=pages * config.page_bytes
        + config.gather_bytes([pages])
        + 3 * config.state_bytes,
    )
    one.run(*REQUESTS)
    assert one.whole.scheduler.stats().preemptions_total
    one.check()


def test_an_answer_that_is_resumed_goes_on_as_without_drafts(one: Engine) -> None:
    """Beside others that begin. Each is resumed after its first token, and in its middle."""
    for turn in range(3):
        one.renew(drafts=True)
        for number, (name, fields) in enumerate(REQUESTS.items()):
            text = one.expected[name]
            known = text[: (0, 1, len(text) // 2)[(turn + number) % 3]]
            one.whole.submit(name, prompt(name), TOKENS, **fields, generated=known)
        one.whole.run()
        assert one.whole.texts == one.expected


def test_a_request_that_is_aborted_leaves_the_others_alone(one: Engine) -> None:
    one.renew(drafts=True)
    start(one.whole, *REQUESTS)
    for name in ("greedy", "bound"):
        one.whole.turns(3)
        one.whole.scheduler.abort(name)
        assert one.whole.texts[name] == one.expected[name][: len(one.whole.texts[name])]
        del one.whole.texts[name]
    one.whole.run()
    one.check()


NAMES = "greedy", "sampled", "short"


def served(
    whole: Whole, times: int = 1, predicted: Mapping[str, Sequence[int]] | None = None
) -> dict[str, list[int]]:
    """Return the answers to `NAMES`, each a prompt so many times over."""
    for name in NAMES:
        fields = REQUESTS[name] | {"prediction": (predicted or {}).get(name, ())}
        whole.submit(name, prompt(name) * times, 60, **fields)
    whole.run()
    return whole.texts


def test_a_replica_drafts_as_its_settings_say(one: Engine) -> None:
    one.renew()
    plain = served(one.whole, 3)
    assert one.whole.scheduler.stats().drafts is None
    for source in ("ngram", "auto"):
        settings = {"spec_decode": source, "spec_decode_dynamic": False}
        drafted = Whole(one.whole.loaded.path, no_ssd=True, **settings)
        assert served(drafted, 3) == plain
        assert drafted.drafts["ngram"].accepted


def test_a_prediction_is_accepted_where_it_is_right(llama: Path) -> None:
    """Two answers as they come, after a beginning that is not in them, and a useless prediction."""
    settings = {"spec_decode": "ngram", "spec_decode_dynamic": False}  # whatever steps take here
    whole = Whole(llama, no_ssd=True, **settings)
    plain = served(whole)
    whole.renew(look_ahead=False)
    predicted = {"greedy": plain["greedy"], "sampled": [9, 9, *plain["sampled"]], "short": [5] * 60}
    assert served(whole, predicted=predicted) == plain
    assert whole.drafts["prediction"].accepted > 60
    assert whole.usage("greedy").accepted_prediction_tokens > 40
