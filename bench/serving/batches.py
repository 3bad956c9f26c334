"""A stream beside a batch that fills all rows of an engine, and alone."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from typing import NamedTuple

import httpx

from bench.servers import ours

LINES, LINE_TOKENS = 64, 900
STREAMS, STREAM_TOKENS, PROMPT_WORDS = 6, 40, 60
ROWS_S = 6.0
"""How long the first lines of a batch may take until they fill all rows."""
_numbers = count()


class Stream(NamedTuple):
    """Times that a client of a stream sees, in seconds."""

    first_token: float
    between_tokens: float  # median
    longest: float  # between two tokens


def batches(model: str, runs: int) -> None:
    """Print the times of single streams alone, and beside a batch that fills all rows, in turn."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as directory,
        ours(model, "--batch-dir", directory) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client,
    ):
        _stream(client)
        for _ in range(runs):
            alone = _streams(client)
            with _batch(client):
                beside = _streams(client)
            _show(alone, beside)


def _show(alone: Stream, beside: Stream) -> None:
    figures = (
        f"{name.replace('_', ' ')} {1e3 * without:.0f} ms alone, {1e3 * with_batch:.0f} ms beside"
        f" ({with_batch / without:.2f} times)"
        for name, without, with_batch in zip(Stream._fields, alone, beside, strict=True)
    )
    print("; ".join(figures), flush=True)


def _streams(client: httpx.Client) -> Stream:
    """Return medians of some streams, one after the other, and the longest time of all."""
    found = [_stream(client) for _ in range(STREAMS)]
    return Stream(
        statistics.median(one.first_token for one in found),
        statistics.median(one.between_tokens for one in found),
        max(one.longest for one in found),
    )


def _stream(client: httpx.Client) -> Stream:
    body = {"prompt": _prompt(), "max_tokens": STREAM_TOKENS, "stream": True, "temperature": 0}
    began = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as answer:
        answer.raise_for_status()
        at = [time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]
    times = [after - before for before, after in pairwise(at[: STREAM_TOKENS - 1])]
    return Stream(at[0] - began, statistics.median(times), max(times))


@contextmanager
def _batch(client: httpx.Client) -> Iterator[None]:
    """Run a batch inside this context, with enough lines to outlast it. Cancel it at the end."""
    body = {"max_tokens": LINE_TOKENS, "temperature": 0, "ignore_eos": True}
    lines = (
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": body | {"prompt": _prompt()},
        }
        for number in range(LINES)
    )
    sent = {"file": ("in.jsonl", "\n".join(map(json.dumps, lines)).encode())}
    file = client.post("/v1/files", files=sent, data={"purpose": "batch"}).raise_for_status()
    made = {
        "input_file_id": file.json()["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    path = f"/v1/batches/{client.post('/v1/batches', json=made).raise_for_status().json()['id']}"
    time.sleep(ROWS_S)
    yield
    assert client.get(path).json()["status"] == "in_progress", "the batch was done too early"
    client.post(f"{path}/cancel").raise_for_status()
    while client.get(path).json()["status"] != "cancelled":
        time.sleep(0.2)


def _prompt() -> str:
    """Return a prompt that shares no prefix with another one."""
    return " ".join(f"{next(_numbers)} word" for _ in range(PROMPT_WORDS // 2))
