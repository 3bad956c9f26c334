"""An engine of two ranks beside one of one rank: speed, the cost of plans, restarts from the SSD.

The model is random, with the tokenizer of the demo, whose own heads do not divide by two."""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from bench import prompts
from bench.client import complete, complete_all
from bench.servers import ours
from engine.model.load import resolve
from engine.parallel.plans import PlanReceiver, PlanSender, pack, unpack
from engine.plan import Decode, Plan, Slot
from services.measuring.answers import StreamedAnswer
from shared.wire import SamplingParams

RANKS, ROWS, FEW, TOKENS, PROMPT_TOKENS = 2, 8, 4, 36, 64
LONG_TOKENS = 4000
PLANS, STORED_S = 3000, 60.0
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
MEMORY_GBS = 819.0
"""Memory bandwidth of an M3 Ultra, the Mac of all published figures of MLX with JACCL."""
LINKS = {"ring over TCP": (300.0, 4.0), "JACCL": (50.0, 6.5)}
"""The latency of a sum in us and GB/s over Thunderbolt 5. Apple states less than 50 us and 50 to
60 Gbps for JACCL, and ten times the latency for the ring."""


class OnPaper(NamedTuple):
    """A model of which only the time to read weights, and sums, are counted."""

    name: str
    gigabytes: float
    layers: int
    width: int

    def step_s(self, macs: int, rows: int, link: str) -> float:
        """Return the seconds of a step of ``rows``: two sums in each layer, and one for the
        tokens."""
        latency_us, speed = LINKS[link]
        sum_s = latency_us / 1e6 + rows * self.width * 2 / (speed * 1e9)
        sums_s = 0.0 if macs == 1 else 2 * self.layers * sum_s + latency_us / 1e6
        return self.gigabytes / MEMORY_GBS / macs + sums_s


PAPER = (
    OnPaper("4B, 4 bits", 2.3, 36, 2560),
    OnPaper("32B, 4 bits", 18.4, 64, 5120),
    OnPaper("123B, 4 bits", 69.0, 88, 12_288),
)
CHECK = OnPaper("27B, 16 bits", 54.0, 64, 5120)


def ranks(model: str, runs: int) -> None:
    """Print all but restarts. The tokenizer is that of the demo, whatever ``model`` says."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        path = make_model(Path(scratch, "model"))
        step_s = speed(str(path), runs)
        plans(step_s)
        messages(str(path))
    on_paper()


def ranks_restart(model: str, runs: int) -> None:
    """Print what two restarted ranks get back from the SSD. The model is that of `ranks`, with
    fewer layers."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        path = make_model(Path(scratch, "model"), num_hidden_layers=4)
        for run in range(runs):
            warm(str(path), Path(scratch, f"ssd-{run}"))


def on_paper() -> None:
    """Print the predicted speed of several Macs relative to one, from published figures, because
    this was never run."""
    for link in LINKS:
        for model in PAPER:
            for rows in (1, ROWS):
                one, two = (model.step_s(macs, rows, link) for macs in (1, 2))
                print(
                    f"on paper, {link}, {model.name}, {rows} rows: {1e3 * one:.1f} ms on one Mac, "
                    f"{1e3 * two:.1f} ms on two, {one / two:.2f} times"
                )
    ratio = CHECK.step_s(1, 1, "JACCL") / CHECK.step_s(4, 1, "JACCL")
    print(f"on paper, JACCL, {CHECK.name} on four Macs: {ratio:.2f} times (published: nearly 3)")


def speed(model: str, runs: int) -> float:
    """Print tokens per second of 1 and `ROWS` streams, in turn. Return the seconds of a step of two
    ranks with `ROWS`."""
    names = ("1 rank", f"{RANKS} ranks")
    step_s = 0.0
    with ExitStack() as stack:
        flags = ("--max-batch-size", str(ROWS), "--no-ssd")
        ports = [stack.enter_context(ours(model, *flags, *more)) for more in ((), ON_RANKS)]
        for streams in (1, ROWS):
            times: tuple[list[float], list[float]] = ([], [])
            for run in range(runs + 1):
                for which in (0, 1) if run % 2 else (1, 0):
                    seed = 1000 * streams + 100 * run + 10 * which
                    found = _step_s(ports[which], streams, seed)
                    if run:  # the first pair warms up
                        times[which].append(found)
            one, two = (statistics.median(each) for each in times)
            ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
            print(
                f"{streams} streams: a step takes {1e3 * one:.1f} ms on {names[0]}, "
                f"{1e3 * two:.1f} ms on {names[1]}: {ratio:.2f} times the speed",
                flush=True,
            )
            step_s = two
    return step_s


def _step_s(port: int, streams: int, seed: int) -> float:
    """Return the seconds of a step with ``streams`` decodes: the time of many tokens minus that
    of a few. (Not every token of a random model produces text.)"""
    took = []
    for number, tokens in enumerate((FEW, TOKENS)):
        texts = [prompts.ids(seed + 2 * i + number, PROMPT_TOKENS) for i in range(streams)]
        answers = asyncio.run(complete_all(port, texts, tokens, ignore_eos=True))
        _check(*answers)
        took.append(max(answer.total_s for answer in answers))
    return (took[1] - took[0]) / (TOKENS - FEW)


def _check(*answers: StreamedAnswer) -> None:
    for answer in answers:
        if answer.error:
            sys.exit(f"a request failed: {answer.error}")


def plans(step_s: float) -> None:
    """Print what it takes rank 0 to pack and send a plan of `ROWS` decodes, and another rank to
    receive it."""
    decodes = tuple(
        Decode(Slot(1, row), position=400 + row, token_id=row, output_index=3, sampling=_SAMPLING)
        for row in range(ROWS)
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    received: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        sender = PlanSender(context, f"ipc://{folder}/plans", RANKS)
        receiver = PlanReceiver(context, f"ipc://{folder}/plans", 1, 1 << 40)

        def receive() -> None:
            for _ in range(PLANS):
                packed = receiver.receive()
                assert packed is not None
                begun = time.perf_counter()
                unpack(packed)
                received.append(time.perf_counter() - begun)

        thread = threading.Thread(target=receive)
        sender.wait_for_ranks(30.0)
        thread.start()
        sent, size = [], 0
        for number in range(PLANS):
            begun = time.perf_counter()
            packed = pack(Plan(step=number, decodes=decodes))
            sender.send(packed)
            sent.append(time.perf_counter() - begun)
            size = len(packed)
            time.sleep(0.0003)  # as between steps: otherwise a queue is measured
        thread.join()
    context.destroy(0)
    mean_s = statistics.mean(sent)
    print(
        f"a plan of {ROWS} decodes: {size} bytes, packed and sent in {1e6 * mean_s:.0f} us "
        f"({100 * mean_s / step_s:.2f} % of a step), unpacked in "
        f"{1e6 * statistics.mean(received):.0f} us",
        flush=True,
    )


_SAMPLING = SamplingParams(seed=1)


def messages(model: str) -> None:
    """Print the messages between ranks in a step of `ROWS`, as passed to MLX."""
    with tempfile.TemporaryDirectory() as folder:
        hosts = Path(folder, "hosts.json")
        port = 20_000 + os.getpid() % 9000
        hosts.write_text(json.dumps([[f"127.0.0.1:{port + n}"] for n in range(RANKS)]))
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.ranks", model],
                env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
                stdout=subprocess.PIPE,
            )
            for rank in range(RANKS)
        ]
        outputs = [child.communicate(timeout=120)[0] for child in children]
    sizes = json.loads(outputs[0])
    assert json.loads(outputs[1]) == sizes
    print(
        f"a step of {ROWS} exchanges {len(sizes)} sums of {min(sizes)} to {max(sizes)} bytes, "
        f"{sum(sizes) / 1e3:.1f} kB in all",
        flush=True,
    )


def _messages_of(path: str) -> list[int]:
    """Return the bytes of each sum in a decode step of `ROWS`, in order, for one of two ranks."""
    import mlx.core as mx

    from engine.parallel.group import RankGroup

    group = RankGroup.join()
    from engine.model.load import load

    loaded = load(Path(path), group=group.mlx)
    sizes: list[int] = []
    real = mx.distributed.all_sum

    def counted(x: mx.array, *arguments: Any, **named: Any) -> mx.array:
        sizes.append(x.nbytes)
        return real(x, *arguments, **named)

    mx.distributed.all_sum = counted
    logits = loaded.model(mx.zeros((ROWS, 1), mx.int32))
    tokens = group.of_first(mx.zeros(ROWS, mx.int32), after=logits)
    mx.eval(logits, tokens)
    return sizes


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
            _check(begin, first, more)
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


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_messages_of(sys.argv[1])))
