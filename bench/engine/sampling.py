"""`python -m bench sampling`: the cost of each sampling parameter in a decode step.

Prints median milliseconds of the sampler alone, for 16 rows of the demo model's logits and of flat
noise. The parameters of a line are set for every row.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

from engine.backend import allocation
from engine.backend.blas import load_fast_blas

load_fast_blas()  # before anything imports mlx

import mlx.core as mx  # noqa: E402
import mlx_lm  # noqa: E402

from bench import prompts  # noqa: E402
from engine.model.load import resolve  # noqa: E402
from engine.plan import Decode  # noqa: E402
from engine.sampling.sampler import Sampler  # noqa: E402
from shared.wire import SamplingParams  # noqa: E402

WARM: dict[str, Any] = {"temperature": 0.8}
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
}
FILTERS: dict[str, Any] = {"top_p": 0.95, "top_k": 40, "min_p": 0.02, "xtc_probability": 1.0}
BIAS: dict[str, Any] = {"logit_bias": [(token, 1.0) for token in range(1000, 1300)]}

CONTROLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties": PENALTIES,
    "greedy, 300 biases": BIAS,
    "greedy, 5 logprobs": {"logprobs": 5},
    "temperature": WARM,
    "temperature, top_p": WARM | {"top_p": 0.95},
    "temperature, top_k": WARM | {"top_k": 40},
    "temperature, min_p": WARM | {"min_p": 0.02},
    "temperature, xtc": WARM | {"xtc_probability": 1.0},
    "temperature, xtc, top_k": WARM | {"xtc_probability": 1.0, "top_k": 40},
    "temperature, penalties": WARM | PENALTIES,
    "all of them": WARM | FILTERS | PENALTIES | BIAS | {"logprobs": 20},
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench sampling", description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--outputs", type=int, default=500, help="tokens generated before")
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    if added := allocation.environment(os.environ):  # as engines do; it is read at the start
        command = [sys.executable, "-m", "bench.engine.sampling", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **added})
    real = _logits(options.rows)
    flat = mx.random.normal(real.shape, key=mx.random.key(1))
    mx.eval(flat)
    print(f"{options.rows} rows, vocabulary {real.shape[1]}, {options.outputs} outputs before; ms")
    print(f"{'':28}{'model':>8}{'flat':>8}")
    for name, controls in CONTROLS.items():
        times = [_ms(logits, controls, options.outputs, options.runs) for logits in (real, flat)]
        print(f"{name:28}" + "".join(f"{ms:8.2f}" for ms in times), flush=True)


def _logits(rows: int) -> mx.array:
    model, tokenizer = mlx_lm.load(str(resolve("demo-fp32")))[:2]
    tokens = tokenizer.encode(prompts.text(3, 16 * rows))[: 16 * rows]
    logits = model(mx.array([tokens]))[0, ::16].astype(mx.float32)
    mx.eval(logits)
    return mx.contiguous(logits)


def _ms(logits: mx.array, controls: dict[str, Any], outputs: int, runs: int) -> float:
    controls = dict(controls)
    logprobs = controls.pop("logprobs", None)
    sampler, times = Sampler(), []
    history = tuple((7 * i) % 900 for i in range(outputs))
    for run in range(runs + 2):
        decodes = [
            Decode(
                slot=row,
                position=outputs + run,
                token_id=None,
                output_index=outputs + run,
                sampling=SamplingParams(seed=row, **controls),
                logprobs=logprobs,
                history=None if run else history,
            )
            for row in range(len(logits))
        ]
        inputs = mx.full((len(logits),), run + 5, mx.int32)
        mx.eval(inputs)
        begun = time.perf_counter()
        sampled = sampler.sample(logits, decodes, inputs)
        mx.eval(sampled.arrays)
        for pending in sampled.logprobs:
            pending.read()
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
