"""One side of a comparison in its own process: `python -m bench.side`.

It reads calls, one line of JSON each, and answers with seconds. Both sides have the same weights
and the same fast BLAS; mlx-lm is otherwise unchanged."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from bench.executor_steps import WARM_UP_STEPS, chunk_s, decode_s, noise
from engine.backend import allocation

SIDES = ("ours", "mlx-lm")


class Side(ABC):
    @abstractmethod
    def prefill(self, start: int, tokens: int) -> float:
        """Return the seconds of a chunk of ``tokens`` that begins at position ``start``."""

    @abstractmethod
    def decode(self, lengths: Sequence[int], steps: int) -> float:
        """Return the seconds of the median step of sequences with these lengths."""

    @abstractmethod
    def generate(self, lengths: Sequence[int], steps: int) -> float:
        """Like `decode`, through the layer that a server calls: with the scheduler, or
        `BatchGenerator`."""


class OurSide(Side):
    def __init__(self, model: str, precision: Any = "auto", **settings: Any) -> None:
        from bench.in_process import InProcessEngine

        self._driver = InProcessEngine(model, precision=precision, **settings)
        self._executor, self._path = self._driver.replica.executor, self._driver.loaded.path
        self._as_weights: list[Any] | None = None

    def prefill(self, start: int, tokens: int) -> float:
        return chunk_s(self._executor, start, tokens)

    def decode(self, lengths: Sequence[int], steps: int) -> float:
        return decode_s(self._executor, lengths, steps)

    def generate(self, lengths: Sequence[int], steps: int) -> float:
        given = [noise(seed, length) for seed, length in enumerate(lengths)]
        return self._driver.step_s(given, steps, WARM_UP_STEPS)

    def read(self) -> float:
        """Return the seconds of reading as many bytes as the checkpoint's weights have, once, on
        all cores: the minimum for a decode step."""
        import numpy as np

        from engine.backend.threads import in_parallel, num_threads

        if self._as_weights is None:
            files = self._path.glob("model*.safetensors")
            size = sum(file.stat().st_size for file in files)
            self._as_weights = np.array_split(np.ones(size // 4, np.float32), num_threads())
        begun = time.perf_counter()
        in_parallel([partial(_read, part) for part in self._as_weights])
        return time.perf_counter() - begun

    def products(self, rows: int) -> float:
        """Return the seconds of everything in a decode step except attention."""
        batches: Any = self._executor
        decoder = batches.batch_class.decoder
        given = [(stretch, stretch.zeros(rows)) for stretch in decoder.stretches]
        begun = time.perf_counter()
        for stretch, inputs in given:
            stretch(*inputs)
        return time.perf_counter() - begun

    def rate(self, texts: list[str], max_tokens: int) -> float:
        """Return the tokens per second of all ``texts`` at once (`InProcessEngine.rate`)."""
        return self._driver.rate(texts, max_tokens)


class MlxLmSide(Side):
    def __init__(self, model: str) -> None:
        import mlx_lm

        from engine.model.load import resolve

        self._model: Any = mlx_lm.load(str(resolve(model)))[0]

    def _caches(self, rows: int, length: int, room: int) -> list[Any]:
        """Return caches filled with noise, as after ``length`` tokens."""
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache

        caches = make_prompt_cache(self._model)
        self._model(mx.zeros((1, 1), mx.int32), cache=caches)
        for cache in caches:
            heads, dim = cache.keys.shape[1], cache.keys.shape[3]
            shape = (rows, heads, -(-(length + room) // cache.step) * cache.step, dim)
            cache.keys, cache.values = mx.random.normal(shape), mx.random.normal(shape)
            cache.offset = length
        mx.eval([cache.state for cache in caches])
        return list(caches)

    def prefill(self, start: int, tokens: int) -> float:
        import mlx.core as mx

        caches = self._caches(1, start, tokens)
        inputs = mx.array([noise(start, tokens)])
        begun = time.perf_counter()
        self._model(inputs, cache=caches)
        mx.eval([cache.state for cache in caches])
        return time.perf_counter() - begun

    def decode(self, lengths: Sequence[int], steps: int) -> float:
        """Works for equal ``lengths`` only."""
        import mlx.core as mx

        caches = self._caches(len(lengths), lengths[0], steps + WARM_UP_STEPS)
        tokens, seconds = mx.full((len(lengths), 1), 5), []
        for _ in range(steps + WARM_UP_STEPS):
            begun = time.perf_counter()
            logits = self._model(tokens, cache=caches)[:, -1]
            tokens = mx.argmax(logits, axis=-1)[:, None]
            mx.eval(tokens)
            seconds.append(time.perf_counter() - begun)
        return statistics.median(seconds[WARM_UP_STEPS:])

    def generate(self, lengths: Sequence[int], steps: int) -> float:
        from mlx_lm.generate import BatchGenerator

        count = len(lengths)
        generator = BatchGenerator(
            self._model,
            max_tokens=steps + 4 * WARM_UP_STEPS,
            completion_batch_size=count,
            prefill_batch_size=count,
        )
        generator.insert(
            [[5] for _ in lengths], caches=[self._caches(1, n - 1, 1) for n in lengths]
        )
        seconds: list[float] = []
        for _ in range(10 * (steps + WARM_UP_STEPS)):
            begun = time.perf_counter()
            _, answers = generator.next()
            if len(answers) == count:
                seconds.append(time.perf_counter() - begun)
            if len(seconds) == steps + WARM_UP_STEPS:
                break
        else:
            raise RuntimeError("the sequences do not run together")
        generator.close()
        return statistics.median(seconds[WARM_UP_STEPS:])


def _read(array: Any) -> None:
    array.max()


class RemoteSide:
    """A side in its own process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def call(self, name: str, *arguments: object) -> float:
        """Call the method ``name`` of the side and return its result."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a side ended with code {self._process.wait()}")
        return float(answer)


@contextmanager
def side(
    name: str, model: str, precision: str = "auto", module: str = "bench.side"
) -> Iterator[RemoteSide]:
    """Start the side ``name``; ours with an engine's environment and ``--cpu-precision``."""
    environment = dict(os.environ)
    if name != "mlx-lm":
        environment |= allocation.environment(environment)
    process = subprocess.Popen(
        [sys.executable, "-m", module, name, model, precision],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield RemoteSide(process)
        finally:
            process.kill()


def answer(make: Callable[[], Side]) -> None:
    """Answer calls to the side that ``make`` returns, in its own process."""
    from engine.backend.blas import load_fast_blas

    load_fast_blas()
    answers, sys.stdout = sys.stdout, sys.stderr
    one = make()
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(getattr(one, method)(*arguments), file=answers, flush=True)


def main(name: str, model: str, precision: str) -> None:
    answer(lambda: OurSide(model, precision) if name == "ours" else MlxLmSide(model))


if __name__ == "__main__":
    main(*sys.argv[1:])
