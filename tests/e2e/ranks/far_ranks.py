"""Ranks in two networks, with a cable between them that delays each packet.

``unshare -rnmpf --kill-child python -m tests.e2e.ranks.far_ranks [MILLISECONDS ...]`` prints the
speed for each delay (one way), and checks the text. It needs what `tests.e2e.ranks.two_machines`
does, and TUN devices.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.e2e.ranks import delayed_cable
from tests.e2e.ranks.two_machines import SECOND, ip
from tests.e2e.server import serving
from tests.tiny_models import make_tiny

TOKENS, REPEATS = 100, 3
SSH = f"""#!/bin/sh
for last; do :; done
exec {" ".join(SECOND)} sh -c "$last"
"""


def main(delays_ms: list[float]) -> None:
    ip("link set lo up")
    for kind, place in (("tmpfs", "/run"), ("proc", "/proc")):
        subprocess.run(["mount", "-t", kind, kind, place], check=True)
    with tempfile.TemporaryDirectory(prefix="far-", dir="/tmp") as folder:
        model = make_tiny("llama", Path(folder, "model"))
        program = Path(folder, "bin", "ssh")
        program.parent.mkdir()
        program.write_text(SSH)
        program.chmod(0o755)
        texts = set()
        for number, delay_ms in enumerate(delays_ms, 1):
            ip("netns add second")
            ip("-n second link set lo up")
            addresses = (f"10.78.{number}.1", f"10.78.{number}.2")
            delayed_cable.lay(addresses, SECOND, delay_ms / 1e3)
            hosts = Path(folder, "hosts.json")
            named = [{"ssh": f"mac{n}", "ips": [each]} for n, each in enumerate(addresses)]
            hosts.write_text(json.dumps(named))
            text, token_s = speed(model, hosts, program.parent)
            texts.add(text)
            ip("netns delete second")
            ip("link delete delayed0")
            print(f"{delay_ms} ms each way: {1e3 * token_s:.1f} ms for a token", flush=True)  # noqa: T201
        assert len(texts) == 1, "another text with another delay"


def speed(model: Path, hosts: Path, programs: Path) -> tuple[str, float]:
    """Return the text of a request, and the seconds of a token of the fastest of some."""
    flags = ("--distributed-mode", "ring", "--distributed-hostfile", str(hosts), "--no-ssd")
    with serving(model, *flags, PATH=f"{programs}:{os.environ['PATH']}") as server:
        times = []
        for _ in range(REPEATS):
            began = time.monotonic()
            answer = server.complete("abc", TOKENS, ignore_eos=True)
            times.append(time.monotonic() - began)
    return answer["choices"][0]["text"], min(times) / TOKENS


if __name__ == "__main__":
    main([float(word) for word in sys.argv[1:]] or [0.0, 1.0, 5.0])
