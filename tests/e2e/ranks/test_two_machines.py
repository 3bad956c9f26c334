"""Engines of another machine, as far as one machine can show it: in namespaces of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.process import ROOT

ISOLATED = ("unshare", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child")


@pytest.mark.slow
def test_engines_join_from_another_network_and_a_cut_cable_breaks_no_stream(
    tiny_model: Callable[..., Path], socket_dir: Path
) -> None:
    if missing := [name for name in ("unshare", "ip", "mount") if shutil.which(name) is None]:
        pytest.skip(f"not on this machine: {', '.join(missing)}")
    cable = ("ip", "link", "add", "one", "type", "veth", "peer", "name", "two")
    allowed = subprocess.run([*ISOLATED, *cable], capture_output=True, text=True)
    if allowed.returncode:
        pytest.skip(f"no network namespaces here: {allowed.stderr.strip()}")
    command = [sys.executable, "-m", "tests.e2e.ranks.two_machines", str(tiny_model("llama"))]
    done = subprocess.run(
        [*ISOLATED, *command, str(socket_dir)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    print(figures)  # noqa: T201
    assert figures["a wrong key"] == "refused"
    assert figures["longest pause s"] > 1, "the cable was cut in the middle"
