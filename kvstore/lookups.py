"""The thread that looks up blocks on the disk."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

MAX_QUEUED_PER_ENGINE = 512
HANG_AFTER_S = 1.0
"""A look-up that takes longer means that the disk hangs. Until it returns, all others miss
immediately, because an engine is waiting for the answer."""

logger = logging.getLogger(__name__)


class Lookups:
    """Runs look-ups in order, with a limit per engine."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lookup")
        self._lock = threading.Lock()
        self._queued: Counter[bytes] = Counter()
        self._running_since: float | None = None

    def submit(self, engine: bytes, look_up: Callable[[], object]) -> bool:
        """Queue ``look_up``. Return False if it will not run."""
        with self._lock:
            since = self._running_since
            hangs = since is not None and time.monotonic() - since > HANG_AFTER_S
            if hangs or self._queued[engine] >= MAX_QUEUED_PER_ENGINE:
                return False
            self._queued[engine] += 1
        self._pool.submit(self._run, engine, look_up)
        return True

    def close(self) -> None:
        """Stop the thread, unless it hangs."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, engine: bytes, look_up: Callable[[], object]) -> None:
        with self._lock:
            self._running_since = time.monotonic()
        try:
            look_up()
        except Exception:
            logger.exception("internal error in a look-up, which gets no answer")
        finally:
            with self._lock:
                self._running_since = None
                self._queued[engine] -= 1
                if not self._queued[engine]:
                    del self._queued[engine]
