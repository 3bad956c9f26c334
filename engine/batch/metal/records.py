"""The results of trials on disk, so that a start on the same machine need not repeat them.

A trial may hang, or end the process: a driver may do either. Each trial therefore leaves a mark
while it runs. A start that finds one uses MLX's own operations."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import msgspec

from engine.backend.kept_files import keep
from engine.batch.metal import kernel
from engine.batch.metal.trial import KernelChoice, KernelTrial
from engine.cache.page_format import PageFormat

logger = logging.getLogger(__name__)

MARK = ".running"
"""The end of names of marks, after the number of the process."""

_folder: Path | None = None
_repeats = False
_known: dict[tuple[PageFormat, int], KernelChoice] = {}


def keep_in(folder: Path | None, *, repeats: bool = False) -> None:
    """Keep results in ``folder`` from now on. If a start ``repeats`` trials, it ignores those
    there."""
    global _folder, _repeats
    _folder, _repeats = folder, repeats
    _known.clear()


def way_of(form: PageFormat, query_heads: int) -> KernelChoice:
    """Return what to use for layers with pages of this form: tried once in a process, and as
    remembered from an earlier one."""
    key = form, query_heads
    if key not in _known:
        _known[key] = _tried(form, query_heads)
    return _known[key]


def _tried(form: PageFormat, query_heads: int) -> KernelChoice:
    trial = KernelTrial(form, query_heads)
    if _folder is None:
        return trial.checked(trial.run())
    path = _folder / f"{_digest(form, query_heads)}.json"
    mark = path.with_suffix(f".{os.getpid()}{MARK}")
    left = _left_marks(path)
    if left and not _repeats:
        logger.warning("a trial of kernels did not end; --prove always repeats it: %s", left[0])
        return KernelChoice(reason="an earlier trial did not end")
    for each in left:
        each.unlink(missing_ok=True)
    with suppress(OSError):
        _folder.mkdir(parents=True, exist_ok=True)
        mark.write_bytes(b"")
    try:
        found = None if _repeats else _read(path)
        way = trial.checked(found or trial.run())
    finally:
        with suppress(OSError):
            mark.unlink(missing_ok=True)
    if found is None:
        keep(path, msgspec.json.encode(way), "the trial of kernels")
    return way


def summary(folder: Path) -> str:
    """Return what the trials in ``folder`` found, for people."""
    ways = [_read(path) for path in sorted(folder.glob("*.json"))]
    attend = sum(way.attends for way in ways if way is not None)
    found = f"{len(ways)} kinds of layers tried, {attend} of them attend by kernels"
    left = len(_left_marks(folder / "*"))
    return f"{found}; {left} trials did not end" if left else found


def _left_marks(path: Path) -> list[Path]:
    """Return the marks of trials of processes that have ended."""
    marks = sorted(path.parent.glob(f"{path.stem}.*{MARK}"))
    return [mark for mark in marks if not _is_running(mark.suffixes[-2][1:])]


def _is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def _digest(form: PageFormat, query_heads: int) -> str:
    """Return a digest of all that a result depends on."""
    device = {name: mx.device_info().get(name) for name in ("device_name", "architecture")}
    texts = [source._asdict() for source in kernel.SOURCES]
    facts = [mx.__version__, platform.platform(), device, texts, repr(form), query_heads]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def _read(path: Path) -> KernelChoice | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=KernelChoice)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        logger.warning("ignored the stored trial in %s: %s", path, error)
        return None
