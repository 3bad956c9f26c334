"""Vectors of texts: how many a second, beside PyTorch, and what others feel of many of them.

The model is of BERT-base's size, with random weights, and texts have 256 tokens. PyTorch is that of
``BENCH_TORCH_PYTHON``, a Python with sentence-transformers: it embeds without a server around it.
mlx-vlm's server is started with ``BENCH_MLX_VLM_PYTHON``, llama.cpp's is the program
``LLAMA_SERVER``. Clients are threads of one other process, each with a connection that stays, and
share the cores with the server.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path

import httpx
import numpy as np

from bench.engine.bert import HIDDEN, LAYERS, POSITIONS, WIDE, make_base, write_gguf
from bench.servers import llama_server, mlx_vlm_server, running
from engine.backend.threads import num_threads
from engine.cpu.onnx.graphs import Graph

TOKENS = 256
SECONDS = {1: 8.0, 32: 24.0}
"""By clients. Servers that compute many texts in a pass answer them all at its end."""
TORCH_VARIABLE = "BENCH_TORCH_PYTHON"
MLX_VLM_VARIABLE = "BENCH_MLX_VLM_PYTHON"
LLAMA_VARIABLE = "LLAMA_SERVER"
_ADDED = 2
"""llama.cpp puts a token before and after each text."""
NAMES = ("here", "products", "PyTorch", "mlx-vlm", "llama.cpp")
LLAMA_BATCH = ("--batch-size", "512", "--ubatch-size", "512")
"""A text has to fit into a pass, and a pass may have several."""
_TORCH = """
import sys, time, random
from sentence_transformers import SentenceTransformer
path, seconds, batch, length = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
model = SentenceTransformer(path, device="cpu")
def text():
    return " ".join(f"w{random.randrange(4000)}" for _ in range(length))
model.encode([text()] * batch, batch_size=batch, show_progress_bar=False)
began, done = time.perf_counter(), 0
while time.perf_counter() - began < seconds:
    model.encode([text() for _ in range(batch)], batch_size=batch, show_progress_bar=False)
    done += batch
print(done / (time.perf_counter() - began))
"""


_CLIENTS = """
import http.client, json, sys, threading, time, itertools
port, clients, length, model = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4]), sys.argv[5]
seconds, kind = float(sys.argv[3]), {"content-type": "application/json"}
numbers = itertools.count()
def client(counts, at):
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    while True:
        number = next(numbers)
        words = [f"w{number % 4000}", f"w{number // 4000 % 4000}", *(["w7"] * (length - 2))]
        body = {"model": model, "input": " ".join(words), "encoding_format": "float"}
        link.request("POST", "/v1/embeddings", json.dumps(body), kind)
        answer = link.getresponse()
        data = answer.read()
        assert answer.status == 200, data[:300]
        counts[at] += 1
counts = [0] * clients
for at in range(clients):
    threading.Thread(target=client, args=(counts, at), daemon=True).start()
time.sleep(2.0)
before, began = sum(counts), time.perf_counter()
time.sleep(seconds)
print((sum(counts) - before) / (time.perf_counter() - began))
"""


_ASK = (
    "import httpx, json, sys; httpx.post(sys.argv[1], content=sys.stdin.buffer.read(), "
    "headers=json.loads(sys.argv[2]), timeout=9999)"
)


def embeddings(model: str, runs: int) -> None:
    """Print texts per second with 1 and 32 clients, a short text beside 2,048 others, and a
    stream beside them."""
    with tempfile.TemporaryDirectory(prefix="bench-") as private:
        folder = make_base(Path(private) / "base")
        _throughput(folder, Path(private), runs)
        _beside_many(folder)
        _stream_beside(folder, model, Path(private))


def product_rate(rows: int) -> float:
    """Return the texts per second if only the products of the layers took time."""
    total = 0.0
    for out, width in ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE)):
        graph = Graph()
        weight = graph.constant(np.random.default_rng(0).standard_normal((out, width), np.float32))
        product = graph.node("Gemm", graph.input("x", "rows", width), weight, transB=1)
        graph.output(product, "rows", out)
        session, x = graph.session(), np.ones((rows, width), np.float32)
        times = []
        for _ in range(12):
            began = time.perf_counter()
            session(x)
            times.append(time.perf_counter() - began)
        total += statistics.median(times[2:])
    return rows / TOKENS / (LAYERS * total)


def _throughput(folder: Path, private: Path, runs: int) -> None:
    print(f"texts of {TOKENS} tokens a second")
    print("clients   here   products alone   PyTorch   mlx-vlm   llama.cpp")
    for clients in SECONDS:
        rates: dict[str, list[float]] = {}
        for _ in range(max(1, runs)):
            for name, rate in _rates(folder, private, clients):
                rates.setdefault(name, []).append(rate)
        here, bound, torch, vlm, llama = (
            f"{statistics.median(rates[name]):.2f}" if name in rates else "-" for name in NAMES
        )
        print(
            f"{clients:7}   {here:>4}   {bound:>14}   {torch:>7}   {vlm:>7}   {llama:>9}",
            flush=True,
        )


def _rates(folder: Path, private: Path, clients: int) -> Iterator[tuple[str, float]]:
    """Yield the rate of each program in turn, by its name."""
    with _served(folder) as port:
        yield "here", _rate(port, clients, "base")
    yield "products", product_rate(TOKENS * min(clients, 2))
    if python := os.environ.get(TORCH_VARIABLE):
        yield "PyTorch", _torch_rate(python, folder, clients)
    if python := os.environ.get(MLX_VLM_VARIABLE):
        with mlx_vlm_server(python, "--embedding-model", str(folder)) as port:
            yield "mlx-vlm", _rate(port, clients, str(folder))
    if program := os.environ.get(LLAMA_VARIABLE):
        gguf = private / "base.gguf"
        if not gguf.exists():
            write_gguf(folder, gguf)
        flags = ("--embedding", "--pooling", "mean", *LLAMA_BATCH)
        threads = num_threads()
        with llama_server(program, gguf, clients, threads, POSITIONS, *flags) as port:
            yield "llama.cpp", _rate(port, clients, "base", TOKENS - _ADDED)


def _torch_rate(python: str, folder: Path, batch: int) -> float:
    command = [python, "-c", _TORCH, str(folder), str(SECONDS[batch]), str(batch), str(TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


@contextmanager
def _served(folder: Path, *flags: str) -> Iterator[int]:
    command = [sys.executable, "-m", "mlx_lm_server", "--host", "127.0.0.1", "--no-ssd"]
    command += flags or ("--model", str(folder), "--served-model-name", "base")
    with running(command, "/readyz") as (port, _):
        yield port


_numbers = count()


def _text(length: int = TOKENS) -> list[int]:
    """Return token ids that no other text has."""
    number = next(_numbers)
    return [1 + number % 4000, 1 + number // 4000, *([7] * (length - 2))]


def _embed(port: int, texts: list[list[int]], key: str = "") -> float:
    """Return the seconds that a request takes."""
    body = {"model": "base", "input": texts, "encoding_format": "base64"}
    began = time.perf_counter()
    url = f"http://127.0.0.1:{port}/v1/embeddings"
    headers = {"authorization": f"Bearer {key}"} if key else {}
    httpx.post(url, json=body, headers=headers, timeout=1200).raise_for_status()
    return time.perf_counter() - began


def _rate(port: int, clients: int, model: str, words: int = TOKENS) -> float:
    """Return the texts per second of ``clients`` clients with one text each."""
    arguments = [str(each) for each in (port, clients, SECONDS[clients], words, model)]
    command = [sys.executable, "-c", _CLIENTS, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return float(done.stdout)


def _beside_many(folder: Path) -> None:
    """Print how long single texts of one key take alone, and beside 2,048 texts of another key."""
    keys = ("--api-key", "many", "--api-key", "single")
    flags = ("--model", str(folder), "--served-model-name", "base", *keys)
    with _served(folder, *flags) as port:
        for length in (16, TOKENS):
            _embed(port, [_text(length)], "single")
            alone = [_embed(port, [_text(length)], "single") for _ in range(8)]
            with _meanwhile(port, [_text(64) for _ in range(2048)], "many"):
                beside = [_embed(port, [_text(length)], "single") for _ in range(16)]
            print(
                f"a text of {length} tokens: {_ms(alone)} ms alone, {_ms(beside)} ms beside 2,048"
                f" of another key (longest {max(beside) * 1e3:.0f})",
                flush=True,
            )


def _stream_beside(folder: Path, model: str, private: Path) -> None:
    """Print the time between tokens of a stream alone, and while texts are embedded."""
    config = private / "both.toml"
    tables = [("chat", model), ("base", str(folder))]
    config.write_text("".join(f'[[model]]\nid = "{n}"\npath = "{p}"\n' for n, p in tables))
    with _served(folder, "--config", str(config)) as port:
        _stream(port)
        _embed(port, [_text()])
        alone = _stream(port)
        with _meanwhile(port, [_text() for _ in range(500)]):
            beside = _stream(port)
    ratio = statistics.median(beside) / statistics.median(alone)
    print(
        f"a token of a stream: {_ms(alone)} ms alone, {_ms(beside)} ms while texts are embedded"
        f" ({ratio:.2f} times)"
    )


def _stream(port: int) -> list[float]:
    """Return the times between tokens."""
    body = {"model": "chat", "prompt": "Once", "max_tokens": 60, "stream": True, "temperature": 0}
    times = []
    url = f"http://127.0.0.1:{port}/v1/completions"
    with httpx.stream("POST", url, json=body | {"ignore_eos": True}, timeout=600) as answer:
        answer.raise_for_status()
        times = [time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]
    return [after - before for before, after in pairwise(times[5:])]


@contextmanager
def _meanwhile(port: int, texts: list[list[int]], key: str = "") -> Iterator[None]:
    """Send ``texts`` inside this context, and disconnect at its end."""
    body = {"model": "base", "input": texts, "encoding_format": "base64"}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    url = f"http://127.0.0.1:{port}/v1/embeddings"
    command = [sys.executable, "-c", _ASK, url, json.dumps(headers)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(json.dumps(body).encode())
    process.stdin.close()
    time.sleep(2.0)
    try:
        yield
        assert process.poll() is None, "the others were done too early"
    finally:
        process.kill()
        process.wait()


def _ms(times: list[float]) -> str:
    return f"{statistics.median(times) * 1e3:.0f}"
