"""Models from the Hugging Face hub: downloaded with progress, or found in the local cache."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

from engine.model.errors import ModelUnavailable, NotNow

logger = logging.getLogger(__name__)

LOG_EVERY_S = 5.0
_DENSE_LAYERS = "*_Dense/model.safetensors"
"""Layers after the pooling of embedding models, which sentence-transformers keeps in folders."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
_NETWORK = ("httpx", "httpcore", "requests", "urllib3", "ssl", "socket", "hf_xet")
"""The libraries whose errors are those of a connection."""
_PASSING = (408, 425, 429)
"""HTTP statuses, besides those of servers, after which the same request may succeed."""
Report = Callable[[int, int], None]
"""Called on any thread with the bytes present and the total, as far as known."""


def download(model: str, report: Report) -> Path:
    """Return the folder of ``model``, a Hugging Face model id, after downloading what is missing.

    The hub is asked each time, but need not answer if nothing is missing. Raises
    `ModelUnavailable` with a one-line message that says what to do: `NotNow` if the same may
    succeed later, and then goes on where it stopped."""
    from huggingface_hub import errors, snapshot_download
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    try:
        found = snapshot_download(
            model,
            allow_patterns=[*DEFAULT_ALLOW_PATTERNS, _DENSE_LAYERS],
            tqdm_class=_reporting_bar(report),
        )
        return Path(found)
    except errors.GatedRepoError as error:
        raise ModelUnavailable(
            f"{model} is gated: request access at https://huggingface.co/{model} and set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelUnavailable(
            f"there is no model {model}, neither here nor on the Hugging Face hub (a private one "
            "requires HF_TOKEN)"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        kind = NotNow if _may_pass(error) else ModelUnavailable
        raise kind(
            f"{model} is not on this machine and the Hugging Face hub cannot be reached: "
            "mlx-lm-server models lists the local ones"
        ) from error
    except Exception as error:  # the hub's HTTP client changes, and so do its exceptions
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if (kept := _kept(model)) is not None:
            logger.warning("%s is used as it is on this machine: the hub fails (%s)", model, reason)
            return kept
        kind = NotNow if _may_pass(error) else ModelUnavailable
        raise kind(f"cannot download {model}: {reason}") from error


def _may_pass(error: BaseException) -> bool:
    """Return whether a download may succeed later: the network or the hub failed, rather than what
    was asked for."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OfflineModeIsEnabled):
            return False
        status = getattr(getattr(seen, "response", None), "status_code", None)
        if status is not None:
            return bool(status >= 500 or status in _PASSING)
        if isinstance(seen, ConnectionError | TimeoutError | IncompleteRead):
            return True
        if type(seen).__module__.partition(".")[0] in _NETWORK:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


class Patience:
    """The reaction to a failed download that may succeed later: the process fails, unless `wait`
    was called; then it tries again for ever."""

    def __init__(self) -> None:
        self._report: Callable[[str], None] | None = None

    def wait(self, report: Callable[[str], None]) -> None:
        """Try again. ``report`` is called with the reason after each failure, and with nothing
        before each attempt that may succeed."""
        self._report = report

    def download(self, model: str) -> Path:
        """Like `download_once`. Raises `NotNow` only if `wait` was not called."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                path = download_once(model)
            except NotNow as error:
                if self._report is None:
                    raise
                logger.warning("%s; trying again in %.0f s", error, pause_s)
                self._report(f"{error} (trying again)")
            else:
                if self._report is not None:
                    self._report("")
                return path
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


patience = Patience()


def _kept(model: str) -> Path | None:
    """Return the folder of ``model`` in the hub's cache; None if config or weights are missing."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(model, local_files_only=True))
        weights = {file.name for file in folder.glob("model*.safetensors")}
        index = folder / "model.safetensors.index.json"
        if index.exists():
            named = set(json.loads(index.read_bytes())["weight_map"].values())
        else:  # part of several files needs one
            named = {"model.safetensors"}
    except Exception:  # of the hub's library, or of a damaged index
        return None
    return folder if named <= weights and (folder / "config.json").is_file() else None


def download_once(model: str) -> Path:
    """Like `download`, with a log line every few seconds while data arrives."""
    began = shown = time.monotonic()
    done = total = 0

    def report(new_done: int, new_total: int) -> None:
        nonlocal shown, done, total
        done, total = new_done, new_total
        now = time.monotonic()
        if now - shown > LOG_EVERY_S:
            shown = now
            speed = done / (now - began) / 1e6
            logger.info(
                "downloading %s: %.2f of %.2f GB, %.1f MB/s", model, done / 1e9, total / 1e9, speed
            )

    path = download(model, report)
    if done:
        took_s = time.monotonic() - began
        logger.info("downloaded %s: %.2f GB in %.0f s", model, done / 1e9, took_s)
    return path


def _reporting_bar(report: Report) -> type[Any]:
    """Return a progress bar class for the hub that shows nothing, and calls ``report``.

    The hub creates two bars that count bytes, for the network and for the disk; either may lag
    behind.
    """
    from tqdm import tqdm

    counting: list[Any] = []

    class SilentBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            if options.get("unit") == "B":
                counting.append(self)

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            totals = [int(bar.total) for bar in counting if bar.total]
            if self in counting and totals:
                report(max(int(bar.n) for bar in counting), min(totals))

    return SilentBar
