"""`python -m bench distill FOLDER`: make a small draft model of the demo model, in FOLDER.

The demo model answers questions, sampled, and for each token its most likely ones are kept. Its
first and last layers, with its embedding and last layer as they are, are then trained to find these
as likely (Hinton et al. 2015), and stored in 8 bits. Those of
`bench.speculation.repetitive` are not among the questions.
One call works for ``--seconds`` and leaves all it did in FOLDER: repeat it until it says
that the model is there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.backend.blas import load_fast_blas

load_fast_blas()  # before anything imports mlx

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
from mlx.utils import tree_flatten, tree_unflatten  # noqa: E402
from mlx_lm.models import llama  # noqa: E402

from bench.in_process import InProcessEngine  # noqa: E402
from engine.model.load import resolve  # noqa: E402
from shared.wire import SamplingParams  # noqa: E402

MODEL = "demo-fp32"
ASKED = """Explain {} in simple words.|Write a short story about {}.|Why is {} important?
Give me three facts about {}.|Write a poem about {}.|What is the history of {}?
How would you describe {} to a child?|Give me some tips about {}.|Write an email about {}.
What do people like about {}?|Tell me a joke about {}.|How does {} work?""".replace("|", "\n")
TOPICS = """the moon,rain,bicycles,bread,music,volcanoes,cats,the sea,computers,football,chess,tea,
trees,money,sleep,castles,trains,honey,maps,dreams,gardens,winter,robots,dinosaurs,pasta,libraries,
mountains,the heart,democracy,glass,paper,dancing,clocks,whales,friendship,coffee,electricity,
farming,teachers,fire,wine,memory,birds,stars,shoes,newspapers,rivers,swimming,vaccines,gold,
painting,ships,telephones,spices,ants,cheese,batteries,lighthouse keepers,marathons,snow"""
QUESTIONS = [
    asked.format(topic.strip())
    for topic, asked in itertools.product(TOPICS.split(","), ASKED.splitlines())
]
random.Random(0).shuffle(QUESTIONS)
ANSWERS, HELD_OUT, TOKENS, AT_ONCE = 480, 24, 96, 32
LIKELY = 16
"""Number of tokens kept of each distribution."""
LAYERS, VOCABULARY = (0, 1, 28, 29), 49_152
STEPS, BATCH, RATE, WARM_UP = 120, 8, 8e-4, 10
OTHERS = 2048
"""Tokens of the vocabulary, beside those that are likely anywhere in a batch, that a step's
softmax is over."""


class TaughtAnswer(msgspec.Struct, frozen=True):
    """An answer of the demo model, and the most likely tokens at each of its positions."""

    number: int  # of the question
    prompt: list[int]
    tokens: list[int]
    ids: list[list[int]]  # (tokens, likely)
    logprobs: list[list[float]]


def collect(path: Path, ends: float) -> list[TaughtAnswer]:
    """Add answers to the lines of ``path`` until all are there or the time is ``ends``."""
    known = _read(path)
    missing = sorted(set(range(ANSWERS)) - {each.number for each in known})
    engine = InProcessEngine(MODEL) if missing else None
    while missing and engine is not None and time.monotonic() < ends:
        numbers, missing = missing[:AT_ONCE], missing[AT_ONCE:]
        with path.open("ab") as file:
            for answer in _answers(engine, numbers):
                known.append(answer)
                file.write(msgspec.json.encode(answer) + b"\n")
    return known


def _read(path: Path) -> list[TaughtAnswer]:
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=TaughtAnswer) for line in lines]


def _answers(engine: InProcessEngine, numbers: Sequence[int]) -> Iterator[TaughtAnswer]:
    engine.renew(None, max_batch_size=AT_ONCE)
    stop = engine.loaded.eos_token_ids
    found: dict[str, TaughtAnswer] = {}
    for number in numbers:
        prompt = engine.encode(QUESTIONS[number], is_chat=True)
        sampling = SamplingParams(seed=number, temperature=0.8)
        name = engine.submit(prompt, TOKENS, stop, sampling=sampling, logprobs=LIKELY)
        found[name] = TaughtAnswer(number, prompt, [], [], [])
    while not engine.replica.scheduler.idle:
        for delta in engine.step():
            answer, scores = found[delta.request_id], delta.logprobs or []
            answer.tokens.extend(delta.token_ids)
            answer.ids.extend(list(each.top_ids) for each in scores)
            answer.logprobs.extend([round(x, 3) for x in each.top] for each in scores)
    yield from found.values()


class Student:
    """Some layers of the demo model, and their training so far."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "training.safetensors"
        self._source = resolve(MODEL)
        self._config = json.loads((self._source / "config.json").read_text())
        self._config |= {"num_hidden_layers": len(LAYERS)}
        self.model = llama.Model(llama.ModelArgs.from_dict(self._config))
        self.optimizer = optim.Adam(RATE, bias_correction=True)
        self.step = 0
        self.model.load_weights(list(self._first_weights().items()))
        self.model.model.embed_tokens.freeze()
        if self._path.exists():
            state: dict[str, mx.array] = mx.load(str(self._path))
            self.step = state.pop("step").item()
            self.optimizer.state = tree_unflatten(_part(state, "optimizer."))
            self.model.load_weights(_part(state, "model."), strict=False)

    def _first_weights(self) -> dict[str, mx.array]:
        weights: dict[str, mx.array] = mx.load(str(self._source / "model.safetensors"))
        found = {}
        for name, weight in weights.items():
            layer = name.removeprefix("model.layers.").split(".")[0]
            if layer.isdigit() and int(layer) in LAYERS:
                place = LAYERS.index(int(layer))
                name = name.replace(f"layers.{layer}.", f"layers.{place}.")
            elif layer.isdigit():
                continue
            found[name] = weight
        return found

    def keep(self) -> None:
        parts = {"model.": self.model.trainable_parameters(), "optimizer.": self.optimizer.state}
        state = {n + name: a for n, tree in parts.items() for name, a in tree_flatten(tree)}
        mx.save_safetensors(str(self._path), state | {"step": mx.array(self.step)})

    def store(self, folder: Path) -> None:
        """Write a model for ``--draft-model-path``."""
        quantized = {"group_size": 32, "bits": 8}
        nn.quantize(self.model, **quantized)
        weights = dict(tree_flatten(self.model.parameters()))
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
        config = self._config | {"quantization": quantized}
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(self._source / name, folder)

    def train(self, answers: Sequence[TaughtAnswer], ends: float) -> None:
        """Train until there are `STEPS` steps or the time is ``ends``."""
        step = nn.value_and_grad(self.model, _loss)
        pick = random.Random(self.step)
        losses: list[float] = []
        while self.step < STEPS and time.monotonic() < ends:
            part = self.step / STEPS
            warmth = min(1.0, (self.step + 1) / WARM_UP)
            self.optimizer.learning_rate = (
                RATE * warmth * (0.02 + 0.98 * math.cos(part * math.pi / 2) ** 2)
            )
            loss, gradients = step(self.model, *_batch(pick.sample(answers, BATCH), pick))
            gradients, _ = optim.clip_grad_norm(gradients, 1.0)
            self.optimizer.update(self.model, gradients)
            mx.eval(self.model.parameters(), self.optimizer.state, loss)
            losses.append(loss.item())
            self.step += 1
            if self.step % 10 == 0:
                self.keep()
                print(f"step {self.step}: loss {np.mean(losses[-10:]):.3f}", flush=True)

    def agreement(self, answers: Sequence[TaughtAnswer]) -> float:
        """Return how often its most likely token is the demo model's."""
        right = total = 0
        for answer in answers:
            text = mx.array([[*answer.prompt, *answer.tokens[:-1]]])
            best = mx.argmax(self.model(text)[0, len(answer.prompt) - 1 :], axis=-1)
            right += sum(
                mine == ids[0] for mine, ids in zip(best.tolist(), answer.ids, strict=True)
            )
            total += len(answer.ids)
        return right / total


def _part(state: dict[str, mx.array], prefix: str) -> list[tuple[str, mx.array]]:
    return [(n.removeprefix(prefix), a) for n, a in state.items() if n.startswith(prefix)]


def _batch(
    answers: Sequence[TaughtAnswer], pick: random.Random
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Return inputs (answers, length), the places of the positions that are trained in them,
    tokens of the vocabulary (columns,), and how likely those are: (positions, columns)."""
    length = max(len(each.prompt) + len(each.tokens) for each in answers) - 1
    inputs = np.zeros((len(answers), length), np.int32)
    places: list[int] = []
    for row, each in enumerate(answers):
        text = [*each.prompt, *each.tokens][:-1]
        inputs[row, : len(text)] = text
        places += range(row * length + len(each.prompt) - 1, row * length + len(text))
    ids = np.array([ids for each in answers for ids in each.ids])
    likely = np.exp(np.array([row for each in answers for row in each.logprobs]))
    others = np.array(pick.sample(range(VOCABULARY), OTHERS))
    columns = np.union1d(ids, others)
    wanted = np.zeros((len(ids), len(columns)), np.float32)
    rows = np.arange(len(ids))[:, None]
    wanted[rows, np.searchsorted(columns, ids)] = likely / likely.sum(axis=1, keepdims=True)
    return mx.array(inputs), mx.array(places), mx.array(columns), mx.array(wanted)


def _loss(
    model: Any, inputs: mx.array, places: mx.array, columns: mx.array, wanted: mx.array
) -> mx.array:
    hidden = model.model(inputs)
    hidden = hidden.reshape(-1, hidden.shape[-1])[places]
    logits = hidden @ model.model.embed_tokens.weight[columns].T
    return (mx.logsumexp(logits, axis=-1) - (wanted * logits).sum(axis=-1)).mean()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench distill", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=math.inf)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + options.seconds
    path = options.folder / "answers.jsonl"
    if len(_read(path)) < ANSWERS:
        # The engine replaces operations of MLX, so training is another call.
        print(f"{len(collect(path, ends))} of {ANSWERS} answers; go on with the same command")
        return
    mx.disable_compile()  # of parts of the model, which needs a C++ compiler
    answers = sorted(_read(path), key=lambda each: each.number)
    random.Random(1).shuffle(answers)
    held_out, answers = answers[:HELD_OUT], answers[HELD_OUT:]
    student = Student(options.folder)
    student.train(answers, ends)
    student.keep()
    print(f"it agrees with the model at {student.agreement(held_out):.3f} of new answers' tokens")
    student.store(options.folder)
    left = "" if student.step == STEPS else "; go on with the same command"
    print(f"the model of {student.step} of {STEPS} steps is in {options.folder}{left}")


if __name__ == "__main__":
    main()
