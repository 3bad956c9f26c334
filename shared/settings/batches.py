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
        "directory for the files of /v1/files and /v1/batches, used by one router only",
        shown_default="none: both endpoints are disabled",
    )
    max_batch_requests: int = flag(
        32, "batch lines that run at once, in capacity that other requests leave idle", at_least=1
    )
    batch_file_mb: int = flag(200, "max size of an uploaded request file in MB", at_least=1)
    batch_max_files: int = flag(500, "max files per API key, including result files", at_least=3)
    batch_max_mb: int = flag(
        2000, "max total size in MB of files and results per API key", at_least=1
    )
    batch_keep_days: int = flag(30, "days until files and finished batches are deleted", at_least=1)
