"""The costs of steps with drafts, stored on disk next to the proof of the model."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from engine.backend import kept_files
from engine.speculation.batch_costs import BatchCosts

logger = logging.getLogger(__name__)

INTERVAL_S = 60.0
"""Min interval between writes, except the last one."""
LONGEST_STEP_S, MAX_TOKENS = 600.0, 1 << 16
"""Values outside this range are not valid costs."""


class KeptCosts:
    """The file of one model, as this process computes it. A separate thread writes it, so that a
    hanging disk blocks nothing."""

    def __init__(self, path: Path, costs: BatchCosts) -> None:
        """Load the file at ``path`` into ``costs``, if it exists."""
        self._path, self._costs = path, costs
        self._writer: threading.Thread | None = None
        self._written_at = time.monotonic()
        costs.remember(_read(path))

    def keep(self, at_once: bool = False) -> None:
        """Write what was learned since the last time, if that was long ago or ``at_once``. Called
        by the thread that learns."""
        now = time.monotonic()
        if not self._costs.changes or (now < self._written_at + INTERVAL_S and not at_once):
            return
        if self._writer is not None and self._writer.is_alive():
            return
        body = msgspec.json.encode(self._costs.known())
        self._costs.changes, self._written_at = 0, now
        self._writer = threading.Thread(
            target=kept_files.keep,
            args=(self._path, body, "the costs of steps"),
            name="costs",
            daemon=True,
        )
        self._writer.start()
        if at_once:
            self._writer.join(1.0)


def _read(path: Path) -> Mapping[int, Mapping[int, float]]:
    try:
        known = msgspec.json.decode(path.read_bytes(), type=dict[int, dict[int, float]])
        counts = [*known, *(drafted for each in known.values() for drafted in each)]
        seconds = [one for each in known.values() for one in each.values()]
        if not all(0 < one < LONGEST_STEP_S for one in seconds):
            raise ValueError("invalid times of steps")
        if not all(0 <= one < MAX_TOKENS for one in counts) or 0 in known:
            raise ValueError("invalid numbers of tokens")
        return known
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        logger.warning("ignored the stored costs in %s: %s", path, error)
        return {}
