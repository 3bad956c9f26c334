"""`mlx-lm-server bench kv`: time to first token with a prefix computed, in RAM, or on SSD."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from engine.plan import page_tokens
from services.commands.admin_client import (
    NoServer,
    ServerRefused,
    add_json_flag,
    administrate,
    table,
)
from services.commands.bench.options import count, counts
from services.commands.parser import CommandParser
from services.commands.progress import progress_shown
from services.measuring.answers import StreamedAnswer
from services.measuring.client import ApiClient
from services.measuring.workloads import words
from services.supervision.own_server import OwnServerFailed, own_server
from shared import settings
from shared.exits import EXIT_FAILED, EXIT_OK, fail

PROG = "mlx-lm-server bench kv"
TIERS = ("computed", "ram", "ssd")
TAIL_WORDS = 16
"""Words that differ between prompts with the same prefix."""
_STORED_WITHIN_S = 120.0
_POLL_S = 0.1


class TierFailed(Exception):
    """The message is one line for the user."""


def main(argv: Sequence[str]) -> int:
    """Measure with a server started for it, and print a table; return the exit code."""
    options, flags = make_parser().parse_known_args(argv)
    server = settings.parse(flags, os.environ, PROG, one_model=True)
    key, admin_key = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    variables = {"MLX_LM_SERVER_API_KEY": key, "MLX_LM_SERVER_ADMIN_KEY": admin_key}
    try:
        with tempfile.TemporaryDirectory(prefix="bench-kv-") as folder:
            flags += ["--ssd-cache-dir", folder, "--ssd-policy", "write_through"]
            with own_server(flags, **variables) as url:
                tiers = _Tiers(url, key, admin_key, Path(folder), page_tokens(server.block_size))
                rows = asyncio.run(tiers.measure(options.tokens, options.runs))
    except (OwnServerFailed, TierFailed, ServerRefused, NoServer, OSError, ValueError) as error:
        return fail(PROG, error, EXIT_FAILED)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if options.json:
        sys.stdout.write(json.dumps({"runs": options.runs, "prefixes": rows}) + "\n")
        return EXIT_OK
    shown: list[list[object]] = [
        ["PREFIX", "COMPUTED ms", "RAM ms", "SSD ms", "RAM HIT", "SSD HIT", "MB ON SSD"]
    ]
    for row in rows:
        times = (f"{1000 * row[f'{name}_s']:.0f}" for name in TIERS)
        found = (row["ram_tokens"], row["ssd_tokens"])
        shown.append([row["prompt_tokens"], *times, *found, f"{row['bytes'] / 1e6:.1f}"])
    title = "time to first token after a prefix of this many tokens (medians)"
    sys.stdout.write(f"{title}\n{table(shown)}\n")
    return EXIT_OK


class _Tiers:
    """Sends prompts whose prefix is in one tier or the other."""

    def __init__(self, url: str, key: str, admin_key: str, folder: Path, page_size: int) -> None:
        self._page_size = page_size
        self._client = ApiClient(url, key)
        self._admin = argparse.Namespace(url=url, admin_key=admin_key)
        self._folder = folder
        self._rng = random.Random(0)

    async def measure(self, tokens: Sequence[int], runs: int) -> list[dict[str, Any]]:
        """Return the results for prefixes of ``tokens``, medians of ``runs``."""
        self._model = (await self._client.models())[0]
        await self._ask(words(self._rng, TAIL_WORDS))
        rows: list[dict[str, Any]] = []
        lengths = [length for length in tokens for _ in range(runs)]
        found: list[dict[str, float]] = []
        with progress_shown() as progress, suppress(asyncio.CancelledError):  # Ctrl-C
            for length in progress.track(lengths, description="prefixes"):
                found += [await self._once(length)]
        self._client.close()
        for length, each in itertools.groupby(zip(lengths, found, strict=False), itemgetter(0)):
            runs_of = [once for _, once in each]
            middle = {
                name: statistics.median(once[name] for once in runs_of) for name in runs_of[0]
            }
            rows.append({"words": length, **middle})
        return rows

    async def _once(self, length: int) -> dict[str, float]:
        prefix = words(self._rng, length)
        before = self._stored()
        computed = await self._ask(prefix)
        ram = await self._ask(prefix)
        stored = await self._all_stored(len(before) + ram.cached_tokens // self._page_size)
        await asyncio.to_thread(administrate, self._admin, "POST", "cache", "clear", tier="ram")
        ssd = await self._ask(prefix)
        return {
            "prompt_tokens": computed.prompt_tokens,
            "computed_s": computed.first_s,
            "ram_s": ram.first_s,
            "ram_tokens": ram.cached_tokens,
            "ssd_s": ssd.first_s,
            "ssd_tokens": ssd.cached_tokens,
            "bytes": stored - sum(before),
        }

    async def _ask(self, prefix: str) -> StreamedAnswer:
        prompt = f"{prefix} {words(self._rng, TAIL_WORDS)}"
        body = {"model": self._model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
        answer = await self._client.stream("/completions", {**body, "ignore_eos": True})
        if answer.error:
            raise TierFailed(f"a request failed: {answer.error} {answer.detail}")
        return answer

    def _stored(self) -> list[int]:
        """Return the sizes of all pages on SSD, in bytes."""
        sizes = []
        for path in self._folder.rglob("*.safetensors"):
            with suppress(FileNotFoundError):  # renamed in the meantime
                sizes.append(path.stat().st_size)
        return sizes

    async def _all_stored(self, pages: int) -> int:
        """Wait until ``pages`` are on SSD; return their size in bytes."""
        deadline = time.monotonic() + _STORED_WITHIN_S
        while len(stored := self._stored()) < pages:
            if time.monotonic() > deadline:
                raise TierFailed(f"only {len(stored)} of {pages} pages were stored on SSD in time")
            await asyncio.sleep(_POLL_S)
        return sum(stored)


def make_parser(*parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """``parents`` contribute flags and --help."""
    parser = CommandParser(
        prog=PROG,
        parents=parents,
        add_help=not parents,
        usage="%(prog)s [flags] [flags of `mlx-lm-server serve`, such as --model and --kv-bits]",
        description="Start a server with its own SSD tier, and measure the time to first token "
        "after a prefix that is computed, in RAM, or on SSD.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--tokens",
        type=counts,
        default=(256, 1024, 4096),
        metavar="N[,N...]",
        help="lengths of the prefix (default: 256,1024,4096)",
    )
    parser.add_argument("--runs", type=count, default=3, help="(default: %(default)s)")
    add_json_flag(parser)
    return parser
