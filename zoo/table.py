"""The page docs/models.md: the results for each architecture."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from engine.model.multimodal import FAMILIES
from zoo.common import WINDOW
from zoo.examine import TOLERANCE, ArchitectureReport
from zoo.farm import Way

_PAGE = """\
# Architectures

<!-- Written by `python -m zoo --write docs/models.md` (`make zoo`): do not edit. -->

Every architecture of mlx-lm {mlx_lm} (mlx {mlx}) was built as a tiny random model with windows of
{window} tokens. The logits of each row were compared with those of mlx-lm's own caches: with uneven
prompts in chunks, while sequences join and leave, after rewinding, after moving to other pages,
and from the pages and the state of another sequence. Right models differ by at most {worst:.0e} of
their logits' standard deviation; more than {tolerance:g} is wrong. A server
[proves](design/pages.md#is-a-model-batchable) a model again when it first starts with it.

"INT8" is the default: keys and values in 8 bits, compared [in another
way](design/quantization.md#how-it-is-proven); right models differ by at most {worst_int8:.0e}.
"As on a GPU" is a second run with a GPU's batches, pages and steps, computed on the same CPU: Metal
itself computes with other kernels. "2 ranks" is for models that mlx-lm can divide
([ranks](distributed.md)), computed by two processes on the CPU.

* On a CPU: {summary}.
* As on a GPU: {summary_gpu}.
* On 2 ranks: {divided} can be divided, {divided_right} right.

Which architectures take adapters by name is a [list of its own](adapters.md#architectures).

Right, batched as `ragged` (each row at its own length) on both paths, with prefixes and INT8:
{plain}.

Those with a star can be divided, and are right and `ragged` on 2 ranks. The others are in the
table. `dense`, `row by row` and `one at a time` are [slower ways to compute a
batch](design/pages.md#is-a-model-batchable). The last column is the reason why a faster
way or INT8 is not possible, often the error that the model's own code raised.

| architecture | served | batched | how | as on a GPU | 2 ranks | prefixes | INT8 | why not faster |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

## Models that take images

Checkpoints of these types take images, through mlx-vlm ([how](design/images.md)), with whose logits
a tiny random model of each is compared. The architecture that computes the language model is in
parentheses, and its results above apply. Other models with a vision part serve text only.

{pictures}
"""


RANKS = 2
PLAIN = ("right", "yes", "ragged", "ragged", "yes", "yes")
"""The best values of a row, without the columns for ranks and reasons."""
_REMAPPED = {"llava": "mistral3", "qwen2_5_vl": "qwen2_vl"}
"""Model types that mlx-lm loads as another architecture (its `MODEL_REMAPPING`)."""

Reports = Mapping[str, ArchitectureReport]
"""By name."""


def page(by_way: Mapping[Way, Reports]) -> str:
    """Return the page, in Markdown: of one process on both paths, and of `RANKS`."""
    reports, as_on_gpu = list(by_way[Way(False)].values()), by_way[Way(True)]
    on_ranks = by_way[Way(ranks=RANKS)]
    right = [report for report in reports if report.right]
    rows = [_row(report, as_on_gpu[report.name], on_ranks.get(report.name)) for report in reports]
    plain = [row for row in rows if _plain_name(row)]
    return _PAGE.format(
        mlx_lm=version("mlx-lm"),
        mlx=version("mlx"),
        window=WINDOW,
        tolerance=TOLERANCE,
        pictures=image_families(rows),
        worst=max((report.difference for report in right), default=0.0),
        worst_int8=max((report.int8_difference for report in right), default=0.0),
        summary=summary(reports),
        summary_gpu=summary(list(as_on_gpu.values())),
        divided=sum(report.loads for report in on_ranks.values()),
        divided_right=sum(report.right for report in on_ranks.values()),
        plain=textwrap.fill(", ".join(map(_plain_name, plain)), 120, break_on_hyphens=False),
        rows="\n".join(row for row in rows if row not in plain),
    )


def _plain_name(row: str) -> str:
    """Return the architecture of a ``row`` that has the best values everywhere, with a star if it
    can be divided; empty for others."""
    name, *cells = _cells(row)
    divided = cells[4] == "ragged"
    is_plain = cells == [*PLAIN[:4], cells[4] if divided else "", *PLAIN[4:], ""]
    return f"{name}{'*' * divided}" if is_plain else ""


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.replace("\\|", "/").strip("|").split("|")]


def image_families(rows: Sequence[str]) -> str:
    """Return a list of the model types that take images, grouped by the ``rows`` of architectures
    that compute their text."""
    by_name = {name: cells for name, *cells in map(_cells, rows)}
    groups: dict[str, list[str]] = {}
    for kind, family in FAMILIES.items():
        name = family.text or _REMAPPED.get(kind, kind)
        served, batched, how, gpu, _, prefixes, int8, *_ = by_name.get(name, [""] * 8)
        found = (
            f"{served}, batched: {batched}, `{how}` (as on a GPU: `{gpu}`), prefixes: {prefixes}"
        )
        groups.setdefault(f"{found}, INT8: {int8}", []).append(f"{kind} ({name})")
    lines = (f"* {found}: {', '.join(kinds)}." for found, kinds in groups.items())
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ") for line in lines)


def summary(reports: Sequence[ArchitectureReport]) -> str:
    """Return the counts, in one line."""
    loads = [f for f in reports if f.loads]
    return ", ".join(
        [
            f"{len(reports)} architectures",
            f"{len(loads)} load here",
            f"{sum(f.right for f in loads)} served right",
            f"{sum(f.right and f.batched for f in loads)} batched",
            f"{sum(f.right and f.prefix_cache for f in loads)} with prefix reuse",
            f"{sum(f.right and f.int8 for f in loads)} with INT8",
            f"{sum(not f.right for f in loads)} wrong",
        ]
    )


def _row(
    report: ArchitectureReport,
    as_on_gpu: ArchitectureReport,
    on_ranks: ArchitectureReport | None,
) -> str:
    served = "right" if report.right else "WRONG" if report.loads else "does not load"
    divided = ""  # mlx-lm cannot do it
    if on_ranks is not None and on_ranks.loads:
        divided = on_ranks.batching if on_ranks.right else f"WRONG: {on_ranks.error}"
    gpu = as_on_gpu.batching if as_on_gpu.right else f"WRONG: {as_on_gpu.error}"
    cells = [
        report.name,
        served,
        "yes" if report.batched else "no" if report.loads else "",
        report.batching,
        gpu.replace("|", "\\|") if as_on_gpu.loads else "",
        divided.replace("|", "\\|"),
        "yes" if report.prefix_cache else "no" if report.loads else "",
        _int8(report),
        _why(report).replace("|", "\\|"),
    ]
    return "| " + " | ".join(cells) + " |"


def _int8(report: ArchitectureReport) -> str:
    if not report.loads:
        return ""
    return "yes" if report.int8 else "partly" if report.int8_difference else "no"


def _why(report: ArchitectureReport) -> str:
    if report.error:
        return report.error
    sixteen_bits = f"16 bits: {report.unquantized}" if report.unquantized else ""
    return "; ".join(filter(None, (report.reason, sixteen_bits)))
