"""An engine of two ranks beside one of one rank: speed, and restarts from the SSD.

The model is random, with the tokenizer of the demo, whose own heads do not divide by two."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench import prompts
from bench.client import checked, complete, complete_all
from bench.servers import ours
from bench.turns import in_turn, median_ratio
from engine.model.load import resolve

RANKS, ROWS, FEW, TOKENS, PROMPT_TOKENS = 2, 8, 4, 36, 64
LONG_TOKENS = 4000
STORED_S = 60.0
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 49_152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
ON_RANKS = ("--distributed-mode", "ring", "--num-local-ranks", str(RANKS))


def ranks(model: str, runs: int) -> None:
    """Print steps. The tokenizer is that of the demo, whatever ``model`` says."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        path = make_model(Path(scratch, "model"))
        speed(str(path), runs)


def ranks_restart(model: str, runs: int) -> None:
    """Print what two restarted ranks get back from the SSD. The model is that of `ranks`, with
    fewer layers."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        path = make_model(Path(scratch, "model"), num_hidden_layers=4)
        for run in range(runs):
            warm(str(path), Path(scratch, f"ssd-{run}"))


def speed(model: str, runs: int) -> None:
    """Print the times of steps of 1 and `ROWS` streams, in turn."""
    with ExitStack() as stack:
        flags = ("--max-batch-size", str(ROWS), "--no-ssd", "--spec-decode", "none")
        ports = [stack.enter_context(ours(model, *flags, *more)) for more in ((), ON_RANKS)]
        for streams in (1, ROWS):
            times = in_turn([partial(_step_s, port, streams) for port in ports], runs, warm_up=1)
            one, two = (1e3 * statistics.median(each) for each in times)
            print(
                f"{streams} streams: a step takes {one:.1f} ms on 1 rank, {two:.1f} ms on {RANKS}"
                f" ranks: {median_ratio(*times):.2f} times the speed",
                flush=True,
            )


def _step_s(port: int, streams: int, run: int) -> float:
    """Return the seconds of a step with ``streams`` decodes: the time of many tokens minus that
    of a few. (Not every token of a random model produces text.)"""
    took, seed = [], 1000 * streams + 100 * run
    for number, tokens in enumerate((FEW, TOKENS)):
        texts = [prompts.ids(seed + 2 * i + number, PROMPT_TOKENS) for i in range(streams)]
        answers = asyncio.run(complete_all(port, texts, tokens, ignore_eos=True))
        took.append(max(answer.total_s for answer in checked(answers)))
    return (took[1] - took[0]) / (TOKENS - FEW)


def warm(model: str, ssd: Path) -> None:
    """Print the time to the first token of a long prompt: computed, and after a restart from the
    files of both ranks."""
    flags = (*ON_RANKS, "--ssd-policy", "write_through")
    prompt, first_s, texts = prompts.ids(7, LONG_TOKENS), [], []
    for cold in (True, False):
        with ours(model, *flags, ssd=ssd) as port:
            begin = asyncio.run(complete(port, prompts.ids(1, 64), 4))
            first = asyncio.run(complete(port, prompt, 1, ignore_eos=True))
            more = asyncio.run(complete(port, prompt, 32, ignore_eos=True))
            checked([begin, first, more])
            first_s.append(first.total_s)
            texts.append(more.text)
            if cold:
                _wait_stored(ssd)
    assert texts[0] == texts[1], "another text"
    print(
        f"{LONG_TOKENS} tokens: first token after {first_s[0]:.2f} s, after a restart "
        f"{first_s[1]:.2f} s with {first.cached_tokens} from the SSD: "
        f"{first_s[0] / first_s[1]:.1f} times as fast, the same text",
        flush=True,
    )


def _wait_stored(folder: Path) -> None:
    deadline = time.monotonic() + STORED_S
    while sum(1 for _ in folder.rglob("*.safetensors")) < RANKS * (LONG_TOKENS // 16):
        if time.monotonic() > deadline:
            sys.exit("the blocks are not on the SSD")
        time.sleep(0.2)


def make_model(path: Path, **changes: int) -> Path:
    """Write a random model of `SHAPE`, with ``changes``, into ``path``, and return it."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import llama

    path.mkdir(parents=True)
    mx.random.seed(0)
    shape = SHAPE | changes
    model = llama.Model(llama.ModelArgs.from_dict(shape))
    weights = {
        name: array if array.ndim == 1 else array / math.sqrt(2)
        for name, array in tree_flatten(model.parameters())
    }
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(shape | {"eos_token_id": 2, "bos_token_id": 1}))
    demo = resolve("demo-fp32")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).symlink_to(demo / name)
    return path
