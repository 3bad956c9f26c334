"""`mlx-lm-server status` in a terminal: the live state of a server, as on its page.

The figures come from the page's feed (`router.http.status.feed`), once per second.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from router.http.endpoints.health import BatchTotals
from router.http.status.figures import (
    EngineFigures,
    ModelFigures,
    Point,
    PromptProgress,
    ServerStatus,
)
from services.commands.admin_client import NoServer, ServerRefused
from services.commands.event_stream import StreamRefused, events, opened
from services.commands.printing import printable
from shared.exits import EXIT_OK

KEY_VARIABLES = ("MLX_LM_SERVER_METRICS_KEY", "MLX_LM_SERVER_API_KEY")
_TIMEOUT_S = 10.0
_RETRY_S = 1.0
_POLL_S = 0.2
_HISTORY = 300
_BARS = " ▁▂▃▄▅▆▇█"
_STATES = {"ok": "green", "degraded": "yellow"}


@dataclass
class StatusSeen:
    """The data received from the feed. Written by its thread, read by the display."""

    status: ServerStatus | None = None
    points: deque[Point] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    trouble: str = ""
    refused: Exception | None = None
    """The reason why retrying is pointless."""


def watch(options: argparse.Namespace) -> int:
    """Show the state until the user quits with q or Ctrl-C; return the exit code.

    Raises `NoServer` and `ServerRefused` if the feed cannot be read at all."""
    seen, first = StatusSeen(), threading.Event()
    # A daemon thread, because it may wait for a silent server.
    threading.Thread(target=_follow, args=(options.url, seen, first), daemon=True).start()
    first.wait()
    console = Console(highlight=False)

    def picture() -> RenderableType:
        return render(seen, options.url, console.width)

    if seen.refused is None:
        with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
            while seen.refused is None and not pressed("q"):
                live.update(picture(), refresh=True)
    if seen.refused is not None:
        raise seen.refused
    return EXIT_OK


def _follow(url: str, seen: StatusSeen, first: threading.Event) -> None:
    """Read the feed, and reconnect when it ends. ``first`` is set once it is known whether there is
    a feed."""
    decoder = msgspec.json.Decoder(ServerStatus)
    keys = [os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)] or [""]
    while seen.refused is None:
        try:
            with opened(f"{url.rstrip('/')}/page/feed", keys[0], _TIMEOUT_S) as lines:
                for event in events(lines):
                    if event.name == "history":
                        points = msgspec.json.decode(event.data, type=list[Point])
                        seen.points.clear()
                        seen.points.extend(points)
                    elif event.name == "status":
                        status = decoder.decode(event.data)
                        seen.status, seen.trouble = status, ""
                        seen.points.append(status.now)
                        first.set()
            seen.trouble = "the server ended the feed"
        except StreamRefused as error:
            if error.status in (401, 403) and len(keys) > 1:
                keys.pop(0)
                continue
            seen.refused = _worded(error)
        except NoServer as error:
            if not first.is_set():
                seen.refused = error
            seen.trouble = str(error)
        except msgspec.DecodeError as error:
            seen.refused = ServerRefused(f"the server has another version: {error}; try --once")
        except Exception as error:  # the display must not wait forever
            seen.refused = error
        if seen.refused is None:
            time.sleep(_RETRY_S)
    first.set()


def _worded(error: StreamRefused) -> Exception:
    if error.status in (401, 403):
        names = " or ".join(f"${name}" for name in KEY_VARIABLES)
        return ServerRefused(f"{error} (set {names}; --once requires no key)")
    if error.status == 404:
        return ServerRefused("the server has no live status (--no-page); use --once")
    return error


@contextmanager
def _keys() -> Iterator[Callable[[str], bool]]:
    """Yield a function that waits a moment and returns whether a key was pressed. Keys are read
    without Enter; Ctrl-C interrupts as usual."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(key: str) -> bool:
        if not select.select([descriptor], [], [], _POLL_S)[0]:
            return False
        typed = os.read(descriptor, 100)
        return not typed or key.encode() in typed  # nothing: the terminal is gone

    tty.setcbreak(descriptor)
    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def render(seen: StatusSeen, url: str, width: int) -> RenderableType:
    """Return the display of the last sample, ``width`` columns wide."""
    status, trouble = seen.status, printable(seen.trouble)
    if status is None:
        return Text(trouble or "waiting for data")
    parts: list[RenderableType] = [_head(status, url), _tiles(status, list(seen.points), width)]
    parts += [Text(printable(reason), style="yellow") for reason in status.reasons]
    if trouble:
        parts.append(Text(f"{trouble}: retrying", style="red"))
    if status.batches.unfinished:
        parts.append(_batches_line(status.batches))
    for model in status.models:
        parts += [Text(), _model_line(model)]
        if model.engines:
            parts.append(_engines([status.engines[name] for name in model.engines]))
    if status.incidents:
        parts += [Text(), Text("recently", style="bold")]
    for each in status.incidents[:8]:
        line = f"{time.strftime('%H:%M:%S', time.localtime(each.at))}  {each.subject}  {each.what}"
        line += f"  ({each.count} times)" if each.count > 1 else ""
        line = printable(line)
        parts.append(Text(line, "red" if each.is_error else "", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _head(status: ServerStatus, url: str) -> RenderableType:
    up_s = int(status.now.at - status.started)
    up = f"{up_s // 3600}:{up_s // 60 % 60:02}:{up_s % 60:02}"
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(status.status.replace("_", " "), f"bold {_STATES.get(status.status, 'red')}")
    line.append(f"  mlx-lm-server {status.version}  {printable(url)}  up {up}  ")
    line.append("q: quit", "dim")
    return line


def _tiles(status: ServerStatus, points: Sequence[Point], width: int) -> RenderableType:
    now, times = status.now, status.first_token
    columns = max(8, (width - 60) // 2)
    grid = Table.grid(padding=(0, 2))

    def plot(values: list[float | None]) -> Text:
        return Text(sparkline(values, columns), "cyan")

    grid.add_row(
        *("tokens/s", Text(f"{now.generated:.1f}", "bold")),
        plot([point.generated for point in points]),
        *("first token", Text(_seconds(None if times is None else times.p50), "bold")),
        plot([point.first_token for point in points]),
    )
    grid.add_row(
        *("requests", Text(f"{now.running} + {now.queued} queued", "bold")),
        plot([float(point.running + point.queued) for point in points]),
        *("cache hits", Text(_percent(now.hit_rate), "bold")),
        plot([point.hit_rate for point in points]),
    )
    grid.add_row(
        *("prompts/s", Text(f"{now.prompt:.1f} tokens", "bold")),
        plot([point.prompt for point in points]),
        *("KV memory", Text(_percent(now.memory_pressure), "bold")),
        plot([point.memory_pressure for point in points]),
    )
    return grid


def _batches_line(batches: BatchTotals) -> RenderableType:
    part = batches.lines_done / batches.lines if batches.lines else None
    line = Text("batches", "bold", no_wrap=True, overflow="ellipsis")
    line.append(f"  {batches.unfinished} unfinished  {batches.lines_done}/{batches.lines} lines")
    line.append(f" ({_percent(part)})  {batches.running} running")
    return line


def _model_line(model: ModelFigures) -> RenderableType:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(printable(model.id), "bold")
    line.append(f"  {model.state}", "green" if model.state == "ready" else "yellow")
    if model.reason:
        line.append(f": {printable(model.reason)}", "red")
    line.append(f"  {model.queued} queued  {model.generated:.1f} tokens/s")
    if model.first_token is not None:
        times = model.first_token
        line.append(f"  first token {_seconds(times.p50)}, p95 {_seconds(times.p95)}")
    return line


def _engines(engines: Sequence[EngineFigures]) -> RenderableType:
    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    shown.add_column("ENGINE", no_wrap=True, max_width=16)
    shown.add_column("STATE", no_wrap=True, max_width=14)
    for name in ("REQ", "TOK/S", "PROMPTS", "BATCH", "STEP", "KV", "CACHED", "LOST"):
        shown.add_column(name, justify="right", no_wrap=True)
    for each in engines:
        rates, prompts = each.rates, each.recent_prompts
        found, all_tokens = prompts.ram + prompts.ssd, prompts.ram + prompts.ssd + prompts.computed
        shown.add_row(
            printable(each.name),
            Text(printable(each.trouble or "ready"), "green" if each.ready else "red"),
            f"{each.sequences}/{each.max_sequences}",
            f"{rates.generated:.1f}" if rates else "-",
            _progress(each.computing),
            f"{rates.batch:.1f}" if rates and rates.batch is not None else "-",
            _seconds(rates.step_s if rates else None),
            _percent(each.memory_pressure),
            _percent(found / all_tokens if all_tokens else None),
            str(each.losses),
        )
    return shown


def _progress(computing: PromptProgress | None) -> str:
    """Return the progress of prompts that take long."""
    return _percent(computing.computed / computing.tokens if computing else None)


def sparkline(values: Sequence[float | None], columns: int) -> str:
    """Return the last ``values``, one per column, as bars up to one line high."""
    last = [value or 0.0 for value in values][-columns:]
    most = max(last, default=0.0) or 1.0
    return "".join(_BARS[round(value / most * (len(_BARS) - 1))] for value in last)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
