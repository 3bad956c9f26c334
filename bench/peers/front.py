"""The picture in README.md: tokens per second and first tokens beside the other MLX servers.

It is drawn from the tables that `bench.peers` writes into docs/benchmarks.md, so it never shows
a figure that is not in a table. ``python -m bench.peers.front`` writes it, and
tests/test_docs.py fails if the two differ."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "docs/benchmarks.md"
PICTURE = ROOT / "docs/pictures/front.svg"

OURS = "mlx-lm-server"
PEERS = ("mlx_lm.server", "vllm-mlx", "rapid-mlx", "mlx-openai-server")
WORKLOAD = "128 tokens in, 32 out"
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
_WIDTH, _HEIGHT = 880, 330
_PANEL = (330, 200)  # of the plot itself, in pixels
_TOP, _LEFTS = 62, (60, 500)

Lines = Mapping[str, Sequence[tuple[int, float]]]
"""For each server, the number of clients and the figure there."""


def figures(text: str, title: str) -> Lines:
    """Return the lines of the table below ``title`` for `WORKLOAD`.

    Each cell is "ours / theirs = ratio", measured in turn. Ours is the median of its row."""
    table = text.split(f"\n{title}", 1)[1].split("\n\n")[1].splitlines()
    head = _cells(table[0])
    lines: dict[str, list[tuple[int, float]]] = {name: [] for name in (OURS, *PEERS)}
    for row in map(_cells, table[2:]):
        if row[0] != WORKLOAD:
            continue
        pairs = {name: _pair(row[head.index(name)]) for name in PEERS}
        lines[OURS].append((int(row[1]), statistics.median(ours for ours, _ in pairs.values())))
        for name, (_, theirs) in pairs.items():
            lines[name].append((int(row[1]), theirs))
    return lines


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _pair(cell: str) -> tuple[float, float]:
    ours, theirs = re.findall(r"[\d.,]+", cell)[:2]
    return float(ours.replace(",", "")), float(theirs.replace(",", ""))


def draw(text: str) -> str:
    """Return the picture of the tables in ``text``, as SVG."""
    speed = figures(text, "Tokens generated a second")
    first = figures(text, "Seconds to the first token, median")
    most = max(value for line in speed.values() for _, value in line)
    least, longest = 0.1, max(value for line in first.values() for _, value in line)
    decades = math.log10(longest / least)
    parts = [
        *_panel(_LEFTS[0], "Tokens per second (higher is better)", (0, 25, 50, 75, 100, 125), speed,
                lambda value: value / max(most, 125)),
        *_panel(_LEFTS[1], "Seconds to the first token (lower is better)", (0.1, 1, 10), first,
                lambda value: math.log10(value / least) / decades),
        *_legend(),
    ]  # fmt: skip
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            'font-family="system-ui, sans-serif" font-size="12" fill="#333">',
            f"<title>{WORKLOAD}, by the number of clients</title>",
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _panel(
    left: int, title: str, ticks: Sequence[float], lines: Lines, share: Callable[[float], float]
) -> list[str]:
    """Return one plot: ``share`` gives the height of a value, from 0 to 1."""
    width, height = _PANEL
    bottom = _TOP + height
    clients = [count for count, _ in lines[OURS]]
    x = {count: left + width * place / (len(clients) - 1) for place, count in enumerate(clients)}

    def y(value: float) -> float:
        return bottom - height * share(value)

    parts = [f'<text x="{left}" y="{_TOP - 16}" font-size="14" font-weight="600">{title}</text>']
    parts += (
        f'<path d="M{left} {y(tick):.1f}h{width}" stroke="#ddd"/>'
        f'<text x="{left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick in ticks
    )
    below = [(x[count], 18, str(count)) for count in clients]
    parts += (
        f'<text x="{place:.1f}" y="{bottom + down}" text-anchor="middle">{label}</text>'
        for place, down, label in [*below, (left + width / 2, 36, "clients at once")]
    )
    for (name, line), color in reversed(list(zip(lines.items(), _COLORS, strict=True))):
        points = [(x[count], y(value)) for count, value in line]
        joined = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
        stroke = 3.5 if name == OURS else 1.8
        parts.append(
            f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="{stroke}"/>'
        )
        parts += (
            f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3.5" fill="{color}"/>'
            for across, down in points
        )
    return parts


def _legend() -> list[str]:
    parts, left = [], 60
    for name, color in zip((OURS, *PEERS), _COLORS, strict=True):
        weight = ' font-weight="600"' if name == OURS else ""
        parts.append(
            f'<path d="M{left} 14h22" stroke="{color}" stroke-width="4"/>'
            f'<text x="{left + 28}" y="18"{weight}>{name}</text>'
        )
        left += 60 + 7 * len(name)
    return parts


if __name__ == "__main__":
    PICTURE.write_text(draw(TABLES.read_text(encoding="utf-8")), encoding="utf-8")
