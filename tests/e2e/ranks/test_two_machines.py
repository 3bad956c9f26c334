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


def in_namespaces(trial: str, *words: str) -> str:
    """Run a module of these tests in namespaces of its own, and return what it prints. Skip the
    test where the command ``trial`` fails in such namespaces."""
    if missing := [name for name in ("unshare", "ip", "mount") if shutil.which(name) is None]:
        pytest.skip(f"not on this machine: {', '.join(missing)}")
    tried = subprocess.run([*ISOLATED, *trial.split()], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no network namespaces here in which {trial!r}: {tried.stderr.strip()}")
    done = subprocess.run(
        [*ISOLATED, sys.executable, "-m", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_engines_join_from_another_network_and_a_cut_cable_breaks_no_stream(
    tiny_model: Callable[..., Path], socket_dir: Path
) -> None:
    cable = "ip link add one type veth peer name two"
    module, model = "tests.e2e.ranks.two_machines", str(tiny_model("llama"))
    printed = in_namespaces(cable, module, model, str(socket_dir))
    figures = json.loads(printed.splitlines()[-1])
    print(figures)  # noqa: T201
    assert figures["a wrong key"] == "refused"
    assert figures["longest pause s"] > 1, "the cable was cut in the middle"
