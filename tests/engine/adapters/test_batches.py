"""Sequences with different adapters in one batch: each as mlx-lm computes it with its own alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from engine.adapters.checkpoint import Shape
from engine.adapters.layers import linear_layers, shape_of
from engine.backend.gpu_path import forced_gpu_path
from engine.model.load import load, resolve
from shared.wire import AdapterRef
from shared.wire.parts import BACKGROUND_PRIORITY
from tests.engine.adapters.random_adapters import random_adapter
from tests.engine.whole import Whole
from tests.tiny_models import VOCAB_SIZE, Kind, make_quantized

COUNT = 4
RANKS = (4, 8, 20, 1)
CLOSE = 2e-3
"""Of log-probabilities of random models, whose logits are far apart."""
CPU: list[Kind] = ["llama", "gemma3", "gpt_oss", "qwen3_next", "deepseek_v2", "mamba"]
GPU: list[Kind] = ["llama", "gemma3", "qwen3_next"]


Asked = dict[str, tuple[list[int], int]]
"""Of requests by name: the prompt, and the number of the adapter."""


class Case(NamedTuple):
    model: Path
    adapters: list[Path]
    whole: Whole

    @property
    def refs(self) -> list[AdapterRef | None]:
        """Every adapter, and none."""
        assert self.whole.replica.adapters is not None
        return [*self.whole.replica.adapters.of_settings, None]


def shapes_of(model: Path) -> dict[str, Shape]:
    layers = linear_layers(load(model).model)
    return {name: shape_of(module) for name, module in layers.items()}


def make_case(model: Path, folder: Path, **settings: Any) -> Case:
    """Adapters of all layers, of some, of other ranks, and in both formats."""
    shapes = shapes_of(model)
    random_names = random.Random(1)
    adapters = []
    for number in range(COUNT):
        names = random_names.sample(sorted(shapes), len(shapes) // 2) if number % 2 else shapes
        some = {name: shapes[name] for name in names}
        path, rank = folder / f"a{number}", RANKS[number % len(RANKS)]
        adapters.append(random_adapter(some, path, number, rank=rank))
    flags = tuple(f"a{number}={path}" for number, path in enumerate(adapters))
    settings = {"num_blocks": 1024, "max_adapter_rank": 20, **settings}
    return Case(model, adapters, Whole(model, adapter=flags, **settings))


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    pick = random.Random(seed)
    return [
        [pick.randrange(3, VOCAB_SIZE) for _ in range(pick.randrange(2, 60))] for _ in range(count)
    ]


def run_all(case: Case, asked: Asked, count: int = 6) -> None:
    for name in asked:
        submit(case, asked, name, count)
    case.whole.run()


def submit(case: Case, asked: Asked, name: str, count: int = 6, **fields: Any) -> None:
    prompt, adapter = asked[name]
    case.whole.submit(name, prompt, count, logprobs=1, adapter=case.refs[adapter], **fields)


def mixed(count: int, seed: int = 5) -> Asked:
    pick = random.Random(seed)
    return {
        f"r{number}": (prompt, pick.randrange(COUNT + 1))
        for number, prompt in enumerate(prompts(count, seed))
    }


def numbered(count: int) -> Asked:
    """Return a request for each of the first adapters."""
    return {f"r{number}": (prompt, number) for number, prompt in enumerate(prompts(count))}


def check(case: Case, asked: Asked, close: float = CLOSE) -> None:
    """Compare the answers to ``asked``, prompts and numbers of adapters, with mlx-lm's own."""
    for number in range(COUNT + 1):
        own = {name: prompt for name, (prompt, adapter) in asked.items() if adapter == number}
        if not own:
            continue
        model = load_model(case.model)[0]
        if number < COUNT:
            model = load_adapters(model, str(case.adapters[number]))
            model.eval()
        for name, prompt in own.items():
            text = case.whole.texts[name]
            logits = model(mx.array([prompt + text[:-1]]))[0, len(prompt) - 1 :]
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            theirs = mx.take_along_axis(logprobs, mx.array(text)[:, None], axis=-1)[:, 0]
            ours = mx.array(case.whole.scores(name))
            assert mx.max(mx.abs(ours - theirs)).item() < close, (name, number)
            best = mx.max(logprobs, axis=-1) - theirs
            assert mx.max(best).item() < close, (name, number)


@pytest.mark.parametrize(
    ("kind", "on_gpu"), [*((kind, False) for kind in CPU), *((kind, True) for kind in GPU)]
)
def test_adapters_mixed_with_none_are_each_as_mlx_lm_computes_it_alone(
    tiny_model: Callable[..., Path], tmp_path: Path, kind: Kind, on_gpu: bool
) -> None:
    with forced_gpu_path() if on_gpu else nullcontext():
        case = make_case(tiny_model(kind), tmp_path)
        asked = numbered(COUNT + 1) | {f"more {name}": one for name, one in mixed(COUNT).items()}
        run_all(case, asked)
        check(case, asked)


@pytest.mark.parametrize(
    ("bits", "kv_bits", "close"),
    [(None, 16, CLOSE), (4, 16, CLOSE), (None, 8, 0.2)],
    ids=["", "quantized weights", "quantized KV"],
)
def test_a_row_has_the_same_bits_whatever_adapters_are_in_its_batch(
    llama: Path, tmp_path: Path, bits: int | None, kv_bits: int, close: float
) -> None:
    model = make_quantized(llama, tmp_path / "quantized", bits) if bits else llama
    precision = "compact" if bits else "auto"
    case = make_case(model, tmp_path, cpu_precision=precision, kv_bits=kv_bits)
    assert case.whole.executor.deterministic
    asked = mixed(8)
    run_all(case, asked)
    together = case.whole.texts, case.whole.logprobs
    case.whole.renew(look_ahead=False)
    texts, logprobs = {}, {}
    for name, one in asked.items():
        run_all(case, {name: one})
        texts[name], logprobs[name] = case.whole.texts[name], case.whole.logprobs[name]
    assert (texts, logprobs) == together
    check(case, asked, close)


@pytest.mark.slow
def test_adapters_of_the_demo_are_each_as_mlx_lm_computes_it_alone(tmp_path: Path) -> None:
    """With drafts, which few steps have."""
    case = make_case(resolve("demo-fp32"), tmp_path, spec_decode="ngram")
    asked = mixed(12)
    run_all(case, asked, 12)
    assert {adapter for _, adapter in asked.values()} == set(range(COUNT + 1))
    check(case, asked)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 24, "block_size": 8, "spec_decode": "ngram"},
        {"max_adapters": 2},
        {"max_adapters": 1, "num_blocks": 24, "block_size": 8, "spec_decode": "ngram"},
    ],
    ids=["little memory", "two places", "one place"],
)
@pytest.mark.usefixtures("nothing_reserved")
def test_drafts_preemption_and_swaps_change_no_answer(
    llama: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    case, asked = make_case(llama, tmp_path, **settings), mixed(14)
    run_all(case, asked, 70)  # more than a page each
    check(case, asked)
    if places := settings.get("max_adapters"):
        assert case.whole.adapters.swaps >= COUNT - places
    else:
        assert case.whole.drafts["ngram"].accepted
        assert case.whole.scheduler.stats().preemptions_total > 0


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_prefixes_are_found_by_the_same_adapter_and_cache_salt_alone(
    tiny_model: Callable[..., Path], tmp_path: Path, kind: Kind
) -> None:
    case = make_case(tiny_model(kind), tmp_path, block_size=4)
    prompt, cached, asked = prompts(1)[0] * 3, [], {}
    askers = [(0, ""), (1, ""), (COUNT, ""), (1, "ann/"), (1, "bob/"), (COUNT, "ann/")]
    for number, (adapter, salt) in enumerate([*askers, *reversed(askers)]):
        asked[f"r{number}"] = prompt, adapter
        submit(case, asked, f"r{number}", cache_salt=salt)
        case.whole.run()
        cached.append(case.whole.usage(f"r{number}").cached_ram_tokens > 0)
    check(case, asked)
    assert cached == [False] * len(askers) + [True] * len(askers)


def test_an_adapter_whose_directory_vanished_or_changed_is_refused_alone(
    llama: Path, tmp_path: Path
) -> None:
    case, asked = make_case(llama, tmp_path, max_adapters=2), numbered(COUNT)
    case.adapters[2].rename(tmp_path / "elsewhere")
    random_adapter(shapes_of(case.model), case.adapters[3], 100)
    run_all(case, asked)
    refused = case.whole.refused
    assert refused.keys() == {"r2", "r3"}
    assert "there is no such directory" in refused["r2"].message
    assert "has changed since it was loaded" in refused["r3"].message
    check(case, {name: one for name, one in asked.items() if name not in refused})


def test_requests_of_batches_give_an_adapters_place_back_and_continue_later(
    llama: Path, tmp_path: Path
) -> None:
    case = make_case(llama, tmp_path, max_adapters=1, spec_decode="ngram")
    asked, whole, batch = numbered(3), case.whole, ("r0", "r1")
    for name in batch:
        submit(case, asked, name, 60, priority=BACKGROUND_PRIORITY)
    whole.turn_until(lambda: any(len(whole.texts[name]) > 4 for name in batch))
    submit(case, asked, "r2")
    whole.turn_until(lambda: whole.ends)
    assert whole.ends.keys() == {"r2"}
    while len(whole.ends) < 3:
        # All are read by now: the engine would sleep until the next message otherwise.
        assert whole.turn() or whole.adapters._reading
    assert {name: len(text) for name, text in whole.texts.items()} == {"r0": 60, "r1": 60, "r2": 6}
    check(case, asked)


def test_an_abort_while_an_adapter_is_read_leaves_the_others(llama: Path, tmp_path: Path) -> None:
    case, asked = make_case(llama, tmp_path, max_adapters=1), numbered(4)
    for name in asked:
        submit(case, asked, name)
    case.whole.scheduler.abort("r1", 0)
    waiting = [one.request_id for one in case.whole.scheduler.live() if not one.accepted]
    assert waiting == ["r2", "r3"]
    case.whole.run()
    assert case.whole.texts.pop("r1") == []
    del asked["r1"]
    check(case, asked)
