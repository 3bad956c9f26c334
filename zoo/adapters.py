"""`python -m zoo.adapters`: tests which architectures support named adapters, and whether
rows with different adapters are correct.

Sequences with two random adapters and with none go through the stages of the proof in one batch.
Each is compared with mlx-lm's own LoRA layers around the same model, with one adapter alone."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRALinear

from engine import device
from engine.adapters.checkpoint import LowRank, Shape
from engine.adapters.layers import adapt, linear_layers, shape_of
from engine.backend.gpu_path import forced_gpu_path
from engine.proving.choose import choose_executor
from engine.proving.oracle import make_reference
from engine.proving.trial import PAGE_TOKENS, Trial
from zoo.build import architectures, build
from zoo.common import VOCAB_SIZE
from zoo.configs import config
from zoo.examine import LENGTHS, STEPS, TOLERANCE

COUNT, RANK, SCALE = 2, 4, 0.5
IMPORT_ENDS_PROCESS = ("olmo",)
"""Architectures whose modules end the process if a package is missing."""
_PART = re.compile(r"(<!-- adapters of architectures -->\n).*?(<!-- end -->)", re.DOTALL)


class AdapterReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results for one architecture."""

    name: str
    layers: int = 0  # linear layers that support adapters
    experts: bool = False  # whether it has experts, which do not support adapters
    batching: str = ""
    difference: float = 0.0
    error: str = ""

    @property
    def right(self) -> bool:
        return not self.error


def examine(name: str) -> AdapterReport | None:
    """Test architecture ``name``; return None if its module has no model."""
    device.prepare()
    try:
        model = build(name)
        vocab_size = config(name).get("vocab_size", VOCAB_SIZE)
    except (Exception, SystemExit):
        return None
    if model is None:
        return None
    layers = linear_layers(model)
    experts = any(
        "Switch" in type(module).__name__ or ".experts." in path
        for path, module in model.named_modules()
    )
    if not layers:
        return AdapterReport(name=name, experts=experts, error="it has no linear layers")
    try:
        return _tried(name, model, layers, vocab_size, experts)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}".partition("\n")[0]
        return AdapterReport(name=name, layers=len(layers), experts=experts, error=error)


def _tried(
    name: str, model: Any, layers: Mapping[str, Any], vocab_size: int, experts: bool
) -> AdapterReport:
    shapes = {layer: shape_of(module) for layer, module in layers.items()}
    made = [_random_adapter(shapes, seed) for seed in range(COUNT)]
    oracles = [build(name), *(_with_lora(build(name), adapter) for adapter in made)]
    references = []
    for number, length in enumerate(LENGTHS):
        place = (number + 1) % len(oracles)
        one = make_reference(oracles[place], length, STEPS, VOCAB_SIZE, number)
        references.append(replace(one, adapter=place))
    store = adapt(layers, COUNT, RANK)
    executor, _, _ = choose_executor(model, vocab_size, PAGE_TOKENS)
    for place, adapter in enumerate(made, 1):
        executor.adapter_store(store).put(place, adapter)
    trial = Trial(executor, stretch=1)
    trial.run_all(references)
    error = ""
    if not trial.max_difference <= TOLERANCE:
        error = f"{trial.worst_stage}: logits differ by {trial.max_difference:.2g}"
    return AdapterReport(
        name=name,
        layers=len(layers),
        experts=experts,
        batching=executor.spec.batching,
        difference=trial.max_difference,
        error=error,
    )


def _random_adapter(shapes: Mapping[str, Shape], seed: int) -> dict[str, LowRank]:
    random = np.random.default_rng(seed)
    return {
        name: LowRank(
            random.standard_normal((shape.inputs, RANK), np.float32) / shape.inputs**0.5,
            random.standard_normal((RANK, shape.outputs), np.float32) * (SCALE / RANK**0.5),
        )
        for name, shape in shapes.items()
    }


def _with_lora(model: Any, adapter: Mapping[str, LowRank]) -> Any:
    """Replace the linear layers of ``model`` with mlx-lm's LoRA layers."""
    modules, replaced = dict(model.named_modules()), []
    for name, factors in adapter.items():
        layer = LoRALinear.from_base(modules[name], r=RANK, scale=1.0)
        layer.lora_a, layer.lora_b = mx.array(factors.down), mx.array(factors.up)
        replaced.append((name, layer))
    model.update_modules(tree_unflatten(replaced))
    model.eval()
    return model


def table(reports: Sequence[AdapterReport]) -> str:
    """Return the page's lists, in Markdown."""
    reports = sorted(reports, key=lambda report: report.name.lower())
    right = [each for each in reports if each.right]
    lines = [
        f"{len(right)} architectures take adapters in their linear layers, except the last one. "
        "In these they exclude experts:",
        "",
        *_wrapped([each.name for each in right if each.experts]),
    ]
    if wrong := [each for each in reports if not each.right]:
        lines += [
            "",
            "None, or not tried:",
            "",
            *(f"* {each.name}: {each.error}" for each in wrong),
        ]
    return "\n".join(lines)


def _wrapped(names: Sequence[str]) -> list[str]:
    return textwrap.wrap(", ".join(names), 120, break_on_hyphens=False)


def _kept(path: Path | None) -> list[AdapterReport]:
    if path is None or not path.exists():
        return []
    lines = path.read_bytes().splitlines()
    return [msgspec.json.decode(line, type=AdapterReport) for line in lines]


def main() -> int:
    """Return 0 if all architectures with linear layers are correct, else 1."""
    parser = argparse.ArgumentParser(prog="python -m zoo.adapters", description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures (default: all)")
    parser.add_argument("--gpu-path", action="store_true", help="compute as on a GPU")
    parser.add_argument("--write", type=Path, help="put the lists into this file")
    parser.add_argument(
        "--results", type=Path, help="keep reports in this file; go on with those that it lacks"
    )
    options = parser.parse_args()
    reports = _kept(options.results)
    known = {report.name for report in reports}
    with forced_gpu_path() if options.gpu_path else nullcontext():
        for name in options.names or architectures():
            if name in known or name in IMPORT_ENDS_PROCESS or (report := examine(name)) is None:
                continue
            reports.append(report)
            if options.results:
                with options.results.open("ab") as file:
                    file.write(msgspec.json.encode(report) + b"\n")
            print(  # noqa: T201
                f"{name:22} {'right' if report.right else 'WRONG':6} {report.layers:4} layers "
                f"{report.batching:12} {report.difference:8.1e} {report.error}",
                flush=True,
            )
    if options.write:
        text, found = options.write.read_text(), table(reports)
        options.write.write_text(_PART.sub(lambda part: f"{part[1]}\n{found}\n\n{part[2]}", text))
    return int(any(report.layers and not report.right for report in reports))


if __name__ == "__main__":
    sys.exit(main())
