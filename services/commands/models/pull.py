"""Downloads a model, with a bar in a terminal and lines in a pipe."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from engine.model.demo import demo_model_path
from engine.model.errors import ModelUnavailable
from engine.model.hub import download, download_once
from engine.model.load import DEMOS, HUB_ID, keeps_codes
from services.processes.model_files import problems
from shared import logs
from shared.exits import EXIT_FAILED, EXIT_OK, EXIT_USAGE, fail

PROG = "mlx-lm-server models pull"


def pull(name: str) -> int:
    """Download the missing files of the model ``name``; return the exit code."""
    if name not in DEMOS and not HUB_ID.fullmatch(name):
        return fail(
            PROG, f"{name!r} is neither a Hugging Face model id (OWNER/MODEL) nor demo", EXIT_USAGE
        )
    console = Console(stderr=True)
    try:
        if name in DEMOS:
            logs.setup("models", "info", "text")
            path = demo_model_path(quantized=keeps_codes(name))
        elif console.is_terminal:
            path = _with_bar(console, name)
        else:
            logs.setup("models", "info", "text")
            path = download_once(name)
    except ModelUnavailable as error:
        return fail(PROG, error, EXIT_FAILED)
    except KeyboardInterrupt:
        return fail(PROG, "stopped; pull again to continue the download", 130)
    if wrong := problems(path):
        return fail(PROG, f"mlx-lm cannot load {name}: {'; '.join(wrong)}", EXIT_FAILED)
    sys.stdout.write(f"{path}\n")
    return EXIT_OK


def _with_bar(console: Console, name: str) -> Path:
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), DownloadColumn()),
        *(TransferSpeedColumn(), TimeRemainingColumn()),
    )
    lock = threading.Lock()
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(name, total=None)

        def show(done: int, total: int) -> None:
            with lock:
                bars.update(task, completed=done, total=total)

        return download(name, show)
