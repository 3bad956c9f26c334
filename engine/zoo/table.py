"""The findings as a page."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from engine.zoo.common import WINDOW
from engine.zoo.examine import TOLERANCE, ArchitectureReport


def page(findings: Sequence[ArchitectureReport]) -> str:
    """The Markdown page docs/models.md."""
    found = [f for f in findings if f.loads]
    rows = [_row(f) for f in findings]
    worst = max((f.difference for f in found if f.right), default=0.0)
    quantized = max((f.int8_difference for f in found if f.right), default=0.0)
    return "\n".join(
        [
            "# Architectures",
            "",
            "<!-- Written by `python -m engine.zoo --write docs/models.md` (`make zoo`): "
            "do not edit. -->",
            "",
            f"Every architecture of mlx-lm {version('mlx-lm')} (mlx {version('mlx')}), built tiny "
            "and random,",
            f"with windows of {WINDOW} tokens, and compared with mlx-lm's own caches by the logits "
            "of each row:",
            "uneven prompts in chunks, joining and leaving, rewinding, moving to another slab, and "
            "starting from",
            "the blocks and the state of another. Wrong is what differs by more than "
            f"{TOLERANCE:g} of the logits' standard",
            f"deviation (the largest difference of a right one: {worst:.0e}). "
            "A loaded model is proven again when",
            "a server starts; what cannot be proven gets the next slower way of computing.",
            "",
            "INT8 is the default: keys and values are rounded to 8 bits when they are written. "
            "The same is done",
            "with it. Two ways of computing a key differ by rounding in fp32, which gives another "
            "code here and",
            "there, and logits that differ by much more; so each row that a slot keeps has to be a "
            "rounding of what",
            "mlx-lm computes from the rows before it as they are kept, and logits have to be "
            "mlx-lm's over the",
            "same codes, as exactly as without quantization (the largest difference of a right "
            f"one: {quantized:.0e}).",
            "",
            f"{summary(findings)}.",
            "",
            "| architecture | served | batched | how | prefix cache | INT8 | why not, or not the "
            "fastest way |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def summary(findings: Sequence[ArchitectureReport]) -> str:
    """The counts, in one line."""
    loads = [f for f in findings if f.loads]
    return ", ".join(
        [
            f"{len(findings)} architectures",
            f"{len(loads)} load here",
            f"{sum(f.right for f in loads)} served right",
            f"{sum(f.right and f.batched for f in loads)} batched",
            f"{sum(f.right and f.prefix_cache for f in loads)} with prefix reuse",
            f"{sum(f.right and f.int8 for f in loads)} with INT8",
            f"{sum(not f.right for f in loads)} wrong",
        ]
    )


def _row(finding: ArchitectureReport) -> str:
    served = "right" if finding.right else "WRONG" if finding.loads else "does not load"
    cells = [
        finding.name,
        served,
        "yes" if finding.batched else "no" if finding.loads else "",
        finding.batching,
        "yes" if finding.prefix_cache else "no" if finding.loads else "",
        _int8(finding),
        _why(finding).replace("|", "\\|"),
    ]
    return "| " + " | ".join(cells) + " |"


def _int8(finding: ArchitectureReport) -> str:
    if not finding.loads:
        return ""
    return "yes" if finding.int8 else "partly" if finding.int8_difference else "no"


def _why(finding: ArchitectureReport) -> str:
    if finding.error:
        return finding.error
    whole = f"16 bits: {finding.unquantized}" if finding.unquantized else ""
    return "; ".join(filter(None, (finding.reason, whole)))
