"""The command: its flags, its progress bar, and optionally a server of its own."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.progress import Progress, TaskID

from services.commands.admin_client import EXIT_NO_SERVER, NoServer, ServerRefused, add_server_flags
from services.commands.batch.client import BatchApi, BatchStatus
from services.commands.batch.work import BatchFailed, Work, refused_hint
from services.commands.parser import CommandParser
from services.commands.progress import progress_shown
from services.supervision.own_server import OwnServerFailed, own_server
from shared.exits import EXIT_FAILED, EXIT_OK, EXIT_USAGE, fail

PROG = "mlx-lm-server batch"
KEY_VARIABLE = "MLX_LM_SERVER_API_KEY"
_OWN_LIMITS = ("--batch-file-mb=100000", "--batch-max-mb=1000000", "--batch-max-files=100000")


def main(argv: Sequence[str]) -> int:
    """Run a file of requests; return the exit code."""
    options = parser().parse_args(argv)
    work = Work(options.source, options.target, options.window, options.in_order)
    if not work.source.is_file():
        return fail(PROG, f"{work.source} is not a file", EXIT_USAGE)
    if work.target.exists() and not (work.has_begun or options.force):
        return fail(PROG, f"{work.target} exists; use --force to replace it", EXIT_USAGE)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        work.prepare()
        with _url(options, work) as url, progress_shown() as progress:
            api = BatchApi(url, os.environ.get(options.key_variable, ""))
            found = work.run(api, _Bar(progress).show)
    except KeyboardInterrupt:
        sys.stderr.write(f"{PROG}: stopped; run the same command again to continue\n")
        return 128 + signal.SIGINT
    except ServerRefused as error:
        _tidy(work)
        return fail(PROG, refused_hint(error), EXIT_FAILED)
    except NoServer as error:
        _tidy(work)
        return fail(PROG, error, EXIT_NO_SERVER)
    except (BatchFailed, OwnServerFailed, OSError) as error:
        _tidy(work)
        return fail(PROG, error, EXIT_FAILED)
    return _report(found, work)


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog=PROG,
        description="Process a file of requests in OpenAI's batch format, using capacity that "
        "other requests leave idle. If stopped, run the same command again to "
        "continue.",
        epilog="Exit codes: 0 all lines succeeded, 1 some failed, 2 invalid arguments, 3 no "
        "server responds.",
    )
    made.add_argument(
        "source", type=Path, metavar="IN.jsonl", help="file with one request per line"
    )
    made.add_argument("target", type=Path, metavar="OUT.jsonl", help="file for the results")
    add_server_flags(made, admin=False)
    made.add_argument(
        "--in-order",
        action="store_true",
        help="write errors to OUT.jsonl too, with one line per line of IN.jsonl, in the same order",
    )
    made.add_argument("--window", default="24h", metavar="TIME", help="max time (default: 24h)")
    made.add_argument("--force", action="store_true", help="replace OUT.jsonl if it exists")
    made.add_argument(
        "--key-variable",
        default=KEY_VARIABLE,
        metavar="NAME",
        help="environment variable with the API key (default: %(default)s)",
    )
    made.add_argument(
        "--serve",
        nargs=argparse.REMAINDER,
        metavar="FLAG",
        help="start a server with these flags and stop it afterwards; must be the last flag",
    )
    return made


@contextmanager
def _url(options: argparse.Namespace, work: Work) -> Iterator[str]:
    """Yield the address of the server, which is already running or started for this batch."""
    if options.serve is None:
        yield options.url
        return
    directory = work.folder / "server"
    with own_server([*options.serve, f"--batch-dir={directory}", *_OWN_LIMITS]) as url:
        yield url


class _Bar:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def show(self, found: BatchStatus) -> None:
        if self._task is None:
            self._task = self._progress.add_task(found.status, total=None, said="")
        failed = f"{found.failed} failed" if found.failed else ""
        self._progress.update(
            self._task,
            description=found.status.replace("_", " "),
            completed=found.completed + found.failed,
            total=found.total or None,
            said=failed,
        )


def _tidy(work: Work) -> None:
    """Remove the work folder if nothing was started."""
    if not work.has_begun:
        shutil.rmtree(work.folder, ignore_errors=True)


def _report(found: BatchStatus, work: Work) -> int:
    text = f"{found.status}: {found.completed} of {found.total} lines succeeded"
    if found.failed:
        text += f", {found.failed} failed: {work.target if work.in_order else work.errors}"
    sys.stderr.write("\n".join([text, *found.errors[:10]]) + "\n")
    complete = found.status == "completed" and not found.failed
    return EXIT_OK if complete else EXIT_FAILED
