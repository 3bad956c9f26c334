"""How long a stream pauses when its only engine is killed, and where its successor's time goes."""

from __future__ import annotations

import asyncio
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import IO

from bench import prompts
from bench.client import complete
from bench.servers import kill_engine, running
from services.measuring.answers import StreamedAnswer

SPARE_S, BEFORE_S, TOKENS = 20.0, 3.0, 250
"""The server idles first, until it has a spare process (--spare-engine-after-s)."""
READY = re.compile(r"ready: \S+, after (.*)")


def restart(model: str, runs: int) -> None:
    """Kill the engine of a stream, and print the longest gap between two of its tokens.

    Its successor finds the stored proof, as after any crash except during the first start."""
    command = [sys.executable, "-m", "mlx_lm_server", "--model", model, "--host", "127.0.0.1"]
    gaps = []
    with tempfile.TemporaryDirectory(prefix="bench-") as cache, tempfile.TemporaryFile() as log:
        command += ["--ssd-cache-dir", cache]
        with running(command, "/readyz", log=log) as (port, server):
            for run in range(runs):
                answer = asyncio.run(_killed(port, server, run))
                if answer.error:
                    sys.exit(f"the stream failed: {answer.error}")
                gaps.append(answer.longest_gap_s)
                load = Path("/proc/loadavg").read_text().split()[0]
                print(f"pause of {gaps[-1]:.1f} s (load {load}): {_last_start(log)}", flush=True)
    print(f"shortest {min(gaps):.1f} s, median {statistics.median(gaps):.1f} s")


async def _killed(port: int, server: int, run: int) -> StreamedAnswer:
    await asyncio.sleep(SPARE_S)
    stream = asyncio.create_task(complete(port, prompts.text(run, 128), TOKENS, ignore_eos=True))
    await asyncio.sleep(BEFORE_S)
    kill_engine(server)
    return await stream


def _last_start(log: IO[bytes]) -> str:
    text = Path(f"/proc/self/fd/{log.fileno()}").read_text(errors="replace")  # from its beginning
    return str(READY.findall(text)[-1])
