"""One run of the command. Its state is stored next to its output, so that it can be continued."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.commands.admin_client import NoServer, ServerRefused
from services.commands.batch.client import BatchApi, BatchStatus
from services.commands.event_stream import StreamRefused

_POLL_S = 0.5
_LONGEST_POLL_S = 5.0
_AWAY_TIMEOUT_S = 120.0
"""Max time to wait for a server that restarts."""


class BatchFailed(Exception):
    """The message is for the user."""


@dataclass(frozen=True)
class Work:
    source: Path
    target: Path
    window: str
    in_order: bool

    @property
    def folder(self) -> Path:
        """The folder with the state until the work is done."""
        return self.target.with_name(self.target.name + ".batch")

    @property
    def errors(self) -> Path:
        return self.target.with_name(f"{self.target.stem}.errors{self.target.suffix}")

    @property
    def has_begun(self) -> bool:
        return (self.folder / "state.json").exists()

    def prepare(self) -> None:
        """Create the folder. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def run(self, api: BatchApi, show: Callable[[BatchStatus], None]) -> BatchStatus:
        """Begin or continue; return the final state. Raises `BatchFailed`, `ServerRefused`,
        `NoServer` and OSError."""
        digest = _digest(self.source)
        state = self._state(digest)
        if state is None:
            endpoint = _endpoint(self.source)
            file_id = api.upload(self.source)
            begun = api.create(file_id, endpoint, self.window)
            state = {"batch": begun.id, "input": file_id, "digest": digest}
            self._write_state(state)
        found = self._follow(api, state["batch"], show)
        self._fetch(api, found)
        (self.folder / "state.json").unlink()  # without the server's files nothing can be continued
        with contextlib.suppress(NoServer, KeyboardInterrupt):
            for each in filter(None, (state["input"], *found.files)):
                with contextlib.suppress(StreamRefused):
                    api.delete(each)
        shutil.rmtree(self.folder, ignore_errors=True)
        return found

    def _state(self, digest: str) -> dict[str, Any] | None:
        if not self.has_begun:
            return None
        try:
            state: dict[str, Any] = json.loads((self.folder / "state.json").read_text())
            known = state["digest"]
        except (ValueError, KeyError, TypeError):
            raise BatchFailed(f"{self.folder} is corrupt: remove it to start again") from None
        if known != digest:
            raise BatchFailed(
                f"{self.folder} belongs to another input: remove it, or choose another output"
            )
        return state

    def _write_state(self, state: dict[str, Any]) -> None:
        new = self.folder / "state.new"
        new.write_text(json.dumps(state))
        new.replace(self.folder / "state.json")

    def _follow(
        self, api: BatchApi, batch_id: str, show: Callable[[BatchStatus], None]
    ) -> BatchStatus:
        away_since: float | None = None
        wait_s = _POLL_S
        while True:
            try:
                found = api.find(batch_id)
                away_since = None
            except NoServer:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > _AWAY_TIMEOUT_S:
                    raise
            except StreamRefused as error:
                if error.status == 404:
                    raise BatchFailed(
                        f"the server no longer has {batch_id}: remove {self.folder} to start again"
                    ) from None
                raise
            else:
                show(found)
                if found.has_ended:
                    return found
            time.sleep(wait_s)
            wait_s = min(wait_s * 1.2, _LONGEST_POLL_S)

    def _fetch(self, api: BatchApi, found: BatchStatus) -> None:
        """Write the results and the errors, each file atomically."""
        parts = [self.folder / "output", self.folder / "errors"]
        for file_id, part in zip(found.files, parts, strict=True):
            part.write_bytes(b"")
            if file_id is not None:
                api.download(file_id, part)
        if self.in_order:
            merged = self.folder / "merged"
            with merged.open("wb") as file:
                file.writelines(_in_order(self.source, parts))
            merged.replace(self.target)
            return
        parts[0].replace(self.target)
        if parts[1].stat().st_size:
            parts[1].replace(self.errors)
        else:
            self.errors.unlink(missing_ok=True)


def refused_hint(error: ServerRefused) -> str:
    is_closed = isinstance(error, StreamRefused) and error.status == 501
    return f"{error} Use --serve to start a server for this batch." if is_closed else str(error)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for line in file:
            if line := line.removeprefix(b"\xef\xbb\xbf").strip():
                yield line


def _endpoint(path: Path) -> str:
    """Return the endpoint of the first line. Raises `BatchFailed`."""
    for line in _lines(path):
        try:
            return str(json.loads(line)["url"])
        except (ValueError, TypeError, KeyError):
            raise BatchFailed(f"{path}, line 1: not a batch request") from None
    raise BatchFailed(f"{path} is empty")


def _in_order(source: Path, parts: list[Path]) -> Iterator[bytes]:
    """Yield a result for each line of ``source``, in order, from both of ``parts``."""
    places: dict[str, tuple[Path, int]] = {}
    for part in parts:
        with part.open("rb") as file:
            start = 0
            for line in file:
                places[json.loads(line)["custom_id"]] = part, start
                start += len(line)
    if not places:  # the source has no valid lines
        return
    files = {part: part.open("rb") for part in parts}
    try:
        for line in _lines(source):
            found = places.get(json.loads(line)["custom_id"])
            if found is not None:
                file = files[found[0]]
                file.seek(found[1])
                yield file.readline()
    finally:
        for file in files.values():
            file.close()
