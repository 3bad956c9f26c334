"""The settings of batches: files of requests that run in the background."""

# ruff: noqa: RUF009  (`flag` makes a dataclass field)
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from shared.flags import flag


@dataclass(frozen=True, kw_only=True)
class BatchesSettings:
    GROUP: ClassVar = "batches"

    batch_dir: Path | None = flag(
        None,
        "directory for /v1/files and /v1/batches, of one router",
        shown_default="none: both are closed",
    )
    max_batch_requests: int = flag(
        32, "lines of batches that run at once, in places that others leave", at_least=1
    )
    batch_file_mb: int = flag(200, "largest file of requests in MB", at_least=1)
    batch_max_files: int = flag(500, "files that a key may have", at_least=1)
    batch_max_mb: int = flag(
        2000, "MB that files and results of a key may have together", at_least=1
    )
    batch_keep_days: int = flag(
        30, "days after which files, and batches that have ended, are removed", at_least=1
    )
