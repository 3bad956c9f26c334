"""Typed decisions: how often they are right, how well their probabilities are calibrated, what
questions cost beside the text that they share, and what they cost the streams of others.

A model of 135 million parameters is right little more often than chance: its figures show the way
of measuring. Run it with the model that you serve (``--model``).
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
import urllib.request
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from bench import prompts
from bench.servers import ours
from bench.serving.growth import counters_of
from services.measuring.client import ApiClient

FACTS = (
    ("Paris is the capital of France", True),
    ("Berlin is the capital of Spain", False),
    ("Water freezes at 0 degrees Celsius", True),
    ("A week has nine days", False),
    ("The sun rises in the east", True),
    ("Fish live in water", True),
    ("Snow is black", False),
    ("Two plus two equals four", True),
    ("Seven is an even number", False),
    ("Dogs are animals", True),
    ("The moon is larger than the earth", False),
    ("A triangle has three sides", True),
    ("Ice is hotter than fire", False),
    ("Tokyo is in Japan", True),
    ("Cats can fly", False),
    ("Honey is sweet", True),
    ("Elephants are smaller than mice", False),
    ("A year has twelve months", True),
    ("Rome is in Brazil", False),
    ("Trees have roots", True),
    ("Cows lay eggs", False),
    ("Birds have feathers", True),
    ("Iron is a metal", True),
    ("Ten is less than five", False),
    ("Rain falls from clouds", True),
    ("A bicycle has six wheels", False),
    ("The Nile is a river", True),
    ("Humans have three hands", False),
    ("Milk is white", True),
    ("Grass is usually purple", False),
    ("Shakespeare wrote plays", True),
    ("A square has five corners", False),
    ("Gold is a metal", True),
    ("Winter is the hottest season", False),
    ("Bread is made from flour", True),
    ("Stones float on water", False),
    ("Bees make honey", True),
    ("Australia is in Europe", False),
    ("An hour has sixty minutes", True),
    ("Sharks live in the desert", False),
)
"""Statements, and whether they are true."""
BINS = 10
STATE_TOKENS, QUESTIONS = 2000, 12
STREAMS, STREAM_TOKENS, DECISIONS_A_MINUTE, SECONDS = 4, 2000, 1000, 20.0
QUESTIONS_A_REQUEST = 10
_HEARTBEATS_S = 1.5
"""After so long the router has the engine's counters."""


def decisions(model: str, runs: int) -> None:
    """Print accuracy, calibration, and what decisions cost."""
    with ours(model, "--no-ssd") as port:
        for samples in (1, 4):
            _print_accuracy(port, samples)
        asyncio.run(_print_sharing(port, runs))
        asyncio.run(_print_beside_streams(port))


def _ask(port: int, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/systemone",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _print_accuracy(port: int, samples: int) -> None:
    questions = {
        str(number): {"type": "noul", "instructions": f"Is this true: {text}?"}
        for number, (text, _) in enumerate(FACTS)
    }
    answers = _ask(port, state=None, questions=questions, samples=samples)["answers"]
    found = [answers[str(number)]["noul"] for number in range(len(FACTS))]
    pairs = list(zip(found, (truth for _, truth in FACTS), strict=True))
    right = sum((p >= 0.5) == truth for p, truth in pairs) / len(pairs)
    brier = statistics.fmean((p - truth) ** 2 for p, truth in pairs)
    ranked = sum(
        (p > q) + (p == q) / 2 for p, yes in pairs for q, no in pairs if yes and not no
    ) / (sum(truth for _, truth in pairs) * sum(not truth for _, truth in pairs))
    mass = statistics.fmean(answers[each]["label_mass"] for each in answers)
    print(
        f"{len(FACTS)} statements, {samples} orders: accuracy {right:.3f}, area under the curve "
        f"{ranked:.3f}, Brier {brier:.3f}, calibration error {_calibration_error(pairs):.3f}, "
        f"label mass {mass:.3f}",
        flush=True,
    )


def _calibration_error(pairs: Sequence[tuple[float, bool]]) -> float:
    """Return the mean distance of confidence and accuracy, over bins of confidence (ECE)."""
    binned: dict[int, list[tuple[float, bool]]] = {}
    for p, truth in pairs:
        confidence, right = max(p, 1 - p), (p >= 0.5) == truth
        binned.setdefault(min(BINS - 1, int(confidence * BINS)), []).append((confidence, right))
    return sum(
        abs(sum(c for c, _ in each) - sum(right for _, right in each)) for each in binned.values()
    ) / len(pairs)


def _question(number: int) -> dict[str, str]:
    return {"type": "noul", "instructions": f"Is there anything about number {number} in it?"}


async def _print_sharing(port: int, runs: int) -> None:
    """Print the time of one question, of several about the same text, and of as many requests."""
    times: dict[str, list[float]] = {"one": [], "together": [], "apart": []}
    computed = text_tokens = tails = 0
    questions = {str(number): _question(number) for number in range(QUESTIONS)}
    for run in range(runs):
        for name in times:
            state = prompts.text(time.monotonic_ns() + run, STATE_TOKENS)
            asked = {"0": questions["0"]} if name == "one" else questions
            await asyncio.sleep(_HEARTBEATS_S)
            before = counters_of(port, ("prefill_tokens_total",))["prefill_tokens_total"]
            began = time.perf_counter()
            if name == "apart":  # each computes the text by itself, as vLLM's rule has it
                asks = (
                    asyncio.to_thread(
                        _ask, port, state=state, questions={key: each}, cache_salt=key
                    )
                    for key, each in questions.items()
                )
                await asyncio.gather(*asks)
            else:
                answer = await asyncio.to_thread(_ask, port, state=state, questions=asked)
            times[name].append(time.perf_counter() - began)
            if name == "together":
                await asyncio.sleep(_HEARTBEATS_S)
                after = counters_of(port, ("prefill_tokens_total",))["prefill_tokens_total"]
                computed = int(after - before)
                tails = answer["usage"]["input_tokens"]
            elif name == "one":
                text_tokens = answer["usage"]["input_tokens"]
    middle = {name: statistics.median(each) for name, each in times.items()}
    print(
        f"{QUESTIONS} questions about a text ({text_tokens} tokens with one question, {tails} with "
        f"all): {computed} prompt tokens computed; one {middle['one']:.2f} s, together "
        f"{middle['together']:.2f} s ({middle['together'] / middle['one']:.2f} times), each alone "
        f"{middle['apart']:.2f} s ({middle['apart'] / middle['together']:.2f} times together)",
        flush=True,
    )


async def _print_beside_streams(port: int) -> None:
    """Print the gaps between the tokens of streams, without and with decisions beside them."""
    url = f"http://127.0.0.1:{port}"
    names = ("key_generated_tokens_total", "decisions_total")
    with closing(ApiClient(url)) as client:
        (model, *_) = await client.models()
        begun = [asyncio.Event() for _ in range(STREAMS)]
        tasks = [
            asyncio.create_task(
                client.stream(
                    "/completions",
                    {"model": model, "prompt": prompts.text(number, 64), "ignore_eos": True}
                    | {"max_tokens": STREAM_TOKENS, "temperature": 0},
                    on_first=event.set,
                )
            )
            for number, event in enumerate(begun)
        ]
        for event in begun:
            await event.wait()
        await asyncio.sleep(1)

        async def steps_s(seconds: float) -> tuple[float, float]:
            """Return the mean time between two tokens of a stream, and decisions a minute."""
            counted, at = counters_of(port, names), time.perf_counter()
            await asyncio.sleep(seconds)
            passed_s = time.perf_counter() - at
            done = {name: value - counted[name] for name, value in counters_of(port, names).items()}
            tokens = done[names[0]] - done[names[1]]  # a decision counts as one token
            return passed_s * STREAMS / tokens, done[names[1]] * 60 / passed_s

        alone_s, _ = await steps_s(SECONDS / 4)
        asking = asyncio.create_task(_keep_asking(port))
        await asyncio.sleep(1)
        beside_s, rate = await steps_s(SECONDS)
        asking.cancel()
        for task in tasks:
            if task.done():
                raise RuntimeError(f"a stream ended: {task.result()}")
            task.cancel()
        await asyncio.gather(asking, *tasks, return_exceptions=True)
    print(
        f"{STREAMS} streams: {1000 * alone_s:.1f} ms a token, {1000 * beside_s:.1f} ms beside "
        f"{rate:.0f} decisions a minute ({beside_s / alone_s:.2f} times)",
        flush=True,
    )


async def _keep_asking(port: int) -> None:
    """Send requests at the rate of `DECISIONS_A_MINUTE`, whether earlier ones are answered."""
    pick, running = random.Random(0), set[asyncio.Task[Any]]()
    interval_s = 60 * QUESTIONS_A_REQUEST / DECISIONS_A_MINUTE
    at = time.perf_counter()
    while True:
        state = prompts.text(pick.randrange(1 << 30), 100)
        questions = {str(number): _question(number) for number in range(QUESTIONS_A_REQUEST)}
        asked = asyncio.to_thread(_ask, port, state=state, questions=questions)
        task = asyncio.create_task(asked)
        running.add(task)
        task.add_done_callback(running.discard)
        at += interval_s
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
