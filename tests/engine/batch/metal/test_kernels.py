"""The kernels in the emulator, against what MLX computes from the same pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.batch.metal import calls, kernel, trial
from engine.batch.metal.calls import PageKernels, Spans, Variant
from engine.batch.metal.kernel import Source
from engine.batch.metal.trial import KernelTrial
from engine.cache.layout import AttentionLayout, KVNode, Layout
from engine.cache.page_format import PageFormat
from engine.cache.quantization import Precision
from tests.engine.batch.metal.emulate import Emulated

PAGE = 16


def form_of(
    heads: int, key_dim: int, value_dim: int, dtype: mx.Dtype = mx.float32, bits: int = 8
) -> PageFormat:
    layer = AttentionLayout(heads, key_dim, value_dim, dtype, None)
    layout = Layout((layer,), (), (KVNode(0),)).with_precision(Precision(bits))
    return PageFormat(layout.arrays[0], layout.arrays[1], PAGE)


CASES = [  # pages, heads of queries, numbers of queries, how the work is divided
    (form_of(2, 128, 128), 8, [1, 5], Variant(4, 16, 4)),
    (form_of(1, 128, 128), 8, [2], Variant(8, 8, 1)),
    (form_of(2, 64, 64), 16, [1], Variant(8, 8, 4)),
    (form_of(2, 64, 64), 6, [3], Variant(2, 4, 1)),
    (form_of(1, 80, 80), 2, [1], Variant(2, 4, 4)),
    (form_of(1, 96, 96), 4, [1, 4], Variant(4, 8, 1)),
    (form_of(1, 192, 192), 2, [1], Variant(2, 16, 4)),
    (form_of(1, 256, 256), 4, [1], Variant(4, 32, 4)),
    (form_of(1, 192, 128), 2, [2], Variant(4, 16, 1)),
    (form_of(2, 128, 128, mx.bfloat16), 8, [1, 16], Variant(8, 16, 4)),
    (form_of(2, 64, 64, mx.float16, bits=16), 8, [1, 2], Variant(4, 8, 4)),
    (form_of(1, 72, 72, mx.bfloat16, bits=16), 3, [1], Variant(2, 2, 1)),
]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("number", range(len(CASES)))
def test_kernels_attend_round_and_gather_as_mlx_does(number: int) -> None:
    """Rows of uneven length, drafts, windows and sinks, with NaN wherever nothing may be read."""
    mx.random.seed(number)
    form, heads, widths, variant = CASES[number]
    tried = KernelTrial(form, heads)
    assert tried.attends_right(variant, widths)
    assert tried.gathers_right()
    assert tried.rounds_right() == (form.keys.quantization is not None)


@pytest.mark.usefixtures("emulated")
def test_every_variant_that_would_be_tried_is_right() -> None:
    form = form_of(2, 64, 64)
    variants = calls.variants_of(form, 8, 1)
    assert len(variants) == 8 and len(set(variants)) == 8
    for variant in variants[::3]:
        assert KernelTrial(form, 8).attends_right(variant, [1])


def test_the_order_of_threads_changes_no_bit(emulated: dict[str, Emulated]) -> None:
    form = form_of(1, 64, 64)
    pool, tables = trial._filled(form, [40, 150])
    rows, found = Spans.of([(39, 40), (149, 150)], tables), []
    query = mx.random.normal((2, 4, 1, 64))
    for seed in (1, 2):
        for each in emulated.values():
            each.seed = seed
        kernels = PageKernels(form)
        out = kernels.attend(pool, query, rows, 0.1, None, None, Variant(4, 8, 4))
        found.append(out)
    assert emulated["paged_join"].calls == 2 and mx.array_equal(*found)


ERRORS = {
    "causal off by one": ("position <= at", "position < at"),
    "window off by one": ("position > at - window", "position >= at - window"),
    "beyond a page": ("slot = place % P;", "slot = place % (2 * P);"),
    "the page of the next position": ("+ place / P])", "+ (place + 1) / P])"),
    "behind the end of a row": ("metal::min(spans[2 * row + 1], ", "metal::max(start + Q, "),
    "no rescaling": ("keep = metal::fast::exp(m[h] - x);", "keep = 1.0f;"),
    "lanes part": ("turn < end; turn", "turn + of_group < end; turn"),
    "groups are not merged": ("step = L; step < 32;", "step = L; step < 16;"),
    "scales of keys": ("Its::GK + in_group * EV / VG", "in_group * EV / VG"),
    "no barrier": (
        "most[simd] = top;\n  threadgroup_barrier(mem_flags::mem_threadgroup);",
        "most[simd] = top;",
    ),
    "the maximum of a lane": ("top = simd_max(top);", ""),
    "another head's sink": ("float(sinks[number / Q %", "float(sinks[(number / Q + 1) %"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_in_a_kernel_are_found(
    name: str, emulated: dict[str, Emulated], built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = ERRORS[name]
    (source,) = [each for each in (kernel.ATTEND, kernel.JOIN) if right in each.body]
    monkeypatch.setattr(trial, "CHECKED_WINDOW", 40)
    monkeypatch.setattr(calls, "PART_TOKENS", (16, 16))  # several parts
    planted = source._replace(body=source.body.replace(right, wrong))

    def make(asked: Source) -> Emulated:
        return Emulated(planted if asked is source else asked, built, seed=3)

    monkeypatch.setattr(kernel, "make", make)
    mx.random.seed(1)
    assert not KernelTrial(form_of(2, 128, 128), 8).attends_right(Variant(4, 16, 1), [2])


def test_errors_in_rounding_and_gathering_are_found(
    emulated: dict[str, Emulated], built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"paged_round": ("MARGIN", "rint(x / s)", "rint(x / s + 0.001f)")}
    texts["paged_gather"] = ("", "position < ends[row]", "position <= ends[row]")

    def make(asked: Source) -> Emulated:
        _, right, wrong = texts[asked.name]
        assert right in asked.body
        return Emulated(asked._replace(body=asked.body.replace(right, wrong)), built)

    monkeypatch.setattr(kernel, "make", make)
    tried = KernelTrial(form_of(2, 64, 64), 4)
    assert not tried.rounds_right() and not tried.gathers_right()


_SIGNATURE = re.compile(r"template <([^>]*)>\s*\[\[kernel\]\] void \w+\((.*?)\) \{", re.DOTALL)


def test_mlx_generates_the_signature_of_the_emulator(
    emulated: dict[str, Emulated],
    built: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """MLX generates the text of a Metal kernel on any machine, when a call is exported."""
    found = []

    def make(source: Source) -> Any:
        ours = Emulated(source, built)
        theirs = mx.fast.metal_kernel(
            name=source.name,
            input_names=source.inputs,
            output_names=source.outputs,
            source=source.body,
            header=source.header,
        )

        def call(*, inputs: list[mx.array], **named: Any) -> list[mx.array]:
            capfd.readouterr()
            mx.export_function(
                str(tmp_path / "kernel.mlxfn"),
                lambda *arrays: theirs(inputs=list(arrays), **named, verbose=True),
                *inputs,
            )
            template, outputs = named["template"], named["output_dtypes"]
            declared, params, _ = ours.signature(inputs, template, outputs)
            found.append((source.name, capfd.readouterr().out, declared, params))
            return ours(inputs=inputs, **named)

        return call

    monkeypatch.setattr(kernel, "make", make)
    form, heads, _, variant = CASES[0]
    tried = KernelTrial(form, heads)
    assert tried.rounds_right() and tried.gathers_right()
    assert tried.attends_right(variant, [1])
    assert {name for name, *_ in found} == {source.name for source in kernel.SOURCES}
    for name, text, declared, params in found:
        match = _SIGNATURE.search(text)
        assert match is not None, (name, text)
        assert _plain(match[1]) == sorted(declared), name
        assert _plain(match[2]) == sorted(params), name


def _plain(listed: str) -> list[tuple[str, str]]:
    """Return types and names without what only Metal has."""
    found = []
    for each in listed.split(","):
        words = re.sub(r"\[\[.*\]\]|\bdevice\b|\bconstant\b", " ", each).split()
        kind = " ".join(words[:-1]).replace("uint32_t", "uint").replace("int32_t", "int")
        found.append((kind, words[-1]))
    return sorted(found)
