"""Texts embedded per second, beside PyTorch.

The model is of BERT-base's size, with random weights, and texts have 256 tokens. PyTorch is that of
``BENCH_TORCH_PYTHON``, a Python with sentence-transformers: it embeds without a server around it.
Clients are threads of one other process, each with a connection that stays, and share the cores
with the server.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from bench.servers import running
from bench.turns import in_turn, median_ratio

TOKENS = 256
SECONDS = 8.0
WORDS = 5000
LAYERS, HIDDEN, WIDE = 12, 768, 3072
TORCH_VARIABLE = "BENCH_TORCH_PYTHON"
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


def embeddings(model: str, runs: int) -> None:
    """Print texts per second with 1 and 32 clients. The model is the random one."""
    python = os.environ.get(TORCH_VARIABLE)
    if not python:
        sys.exit(f"{TORCH_VARIABLE} has to be a Python that has sentence-transformers")
    with tempfile.TemporaryDirectory(prefix="bench-") as private:
        folder = make_base(Path(private) / "base")
        command = [sys.executable, "-m", "mlx_lm_server", "--host", "127.0.0.1", "--no-ssd"]
        command += ["--model", str(folder), "--served-model-name", "base"]
        with running(command, "/readyz") as (port, _):
            for clients in (1, 32):
                measures = (
                    lambda _, n=clients: _rate(port, n),
                    lambda _, n=clients: _torch_rate(python, folder, n),
                )
                rates = in_turn(measures, runs)
                mine, torch = map(statistics.median, rates)
                print(
                    f"{clients} clients: {mine:.2f} texts/s, PyTorch {torch:.2f}, "
                    f"ratio {median_ratio(*rates):.2f}",
                    flush=True,
                )


def make_base(path: Path) -> Path:
    """Write a random encoder of BERT-base's size into ``path``, and return it."""
    path.mkdir()
    random = np.random.default_rng(0)

    def weights(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return random.standard_normal(shape, np.float32) * np.float32(0.03)

    def affine(name: str, out: int, width: int) -> dict[str, Any]:
        return {f"{name}.weight": weights(out, width), f"{name}.bias": weights(out)}

    def norm(name: str) -> dict[str, Any]:
        return {f"{name}.weight": np.ones(HIDDEN, np.float32), f"{name}.bias": weights(HIDDEN)}

    tensors = {
        "embeddings.word_embeddings.weight": weights(WORDS, HIDDEN),
        "embeddings.position_embeddings.weight": weights(512, HIDDEN),
        "embeddings.token_type_embeddings.weight": weights(2, HIDDEN),
        **norm("embeddings.LayerNorm"),
    }
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            tensors |= affine(f"{at}.attention.self.{part}", HIDDEN, HIDDEN)
        tensors |= affine(f"{at}.attention.output.dense", HIDDEN, HIDDEN)
        tensors |= affine(f"{at}.intermediate.dense", WIDE, HIDDEN)
        tensors |= affine(f"{at}.output.dense", HIDDEN, WIDE)
        tensors |= norm(f"{at}.attention.output.LayerNorm") | norm(f"{at}.output.LayerNorm")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "bert", "architectures": ["BertModel"], "vocab_size": WORDS,
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 12,
        "intermediate_size": WIDE, "max_position_embeddings": 512, "type_vocab_size": 2,
        "hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 0,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    names = ["[PAD]", *(f"w{number}" for number in range(WORDS - 1))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "[PAD]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(path / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    (path / "tokenizer_config.json").write_text(json.dumps(kind))
    return path


def _torch_rate(python: str, folder: Path, batch: int) -> float:
    command = [python, "-c", _TORCH, str(folder), str(SECONDS), str(batch), str(TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def _rate(port: int, clients: int) -> float:
    """Return the texts per second of ``clients`` clients with one text each."""
    arguments = [str(each) for each in (port, clients, SECONDS, TOKENS, "base")]
    command = [sys.executable, "-c", _CLIENTS, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return float(done.stdout)
