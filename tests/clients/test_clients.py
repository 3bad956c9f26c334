"""OpenAI's and Anthropic's clients against a whole server.

`python -m tests.clients` runs all clients, and installs them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.__main__ import KEY, SERVED, by_run, environment_of, write_config
from tests.clients.environments import SCENARIOS
from tests.clients.matrix import CLIENTS, Cell, Row, joined, table
from tests.clients.matrix import SCENARIOS as MATRIX
from tests.clients.reciter import make_reciter
from tests.e2e.server import Server, serving
from tests.tiny_models import make_inserting

NODE = next(client for client in CLIENTS if client.script == "openai_node.mjs")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_reciter(tmp_path_factory.mktemp("reciter"))
    flags = ("--served-model-name", SERVED, "--api-key", KEY, "--no-ssd")
    with serving(model, *flags) as running:
        yield running


def check_all(server: Server, *command: str) -> None:
    ran = subprocess.run(
        command, env=environment_of(server), capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    results = [json.loads(line) for line in ran.stdout.splitlines()]
    assert results
    failed = {each["scenario"]: each["reason"] for each in results if each["result"] != "pass"}
    assert not failed, ran.stderr


@pytest.mark.parametrize("script", ["openai_python.py", "anthropic_python.py"])
def test_python_clients_work(server: Server, script: str) -> None:
    check_all(server, sys.executable, str(SCENARIOS / script))


def test_a_client_decides(server: Server) -> None:
    script = str(SCENARIOS / "decisions" / "openai_decisions.py")
    check_all(server, sys.executable, script, "decide", "errors")


def test_a_client_embeds(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with serving(None, "--config", str(config), "--api-key", KEY, "--no-ssd") as server:
        script = str(SCENARIOS / "vectors" / "openai_embeddings.py")
        check_all(server, sys.executable, script, "embed", "errors")


def test_clients_fill_gaps(tmp_path: Path) -> None:
    flags = ("--served-model-name", SERVED, "--api-key", KEY, "--no-ssd")
    with serving(make_inserting(tmp_path / "model"), *flags) as server:
        for script in ("openai_suffix.py", "recorded_infill.py"):
            scenarios = ("insert", "errors", "cancel")
            check_all(server, sys.executable, str(SCENARIOS / "inserts" / script), *scenarios)


def test_a_node_client_works(server: Server, pytestconfig: pytest.Config) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no Node here")
    (package,) = NODE.packages
    directory = pytestconfig.cache.mkdir("node-" + package.replace("@", "-"))
    if not (directory / "node_modules").exists():
        install = ["npm", "install", "--silent", "--no-audit", "--no-fund", package]
        installed = subprocess.run(install, cwd=directory, capture_output=True, text=True)
        if installed.returncode:
            pytest.skip(f"npm could not install {package}: {installed.stderr.strip()[-200:]}")
    for script in SCENARIOS.glob("*.mjs"):
        shutil.copy(script, directory)
    check_all(server, "node", str(directory / NODE.script))


def test_a_script_runs_once_with_each_set_of_packages() -> None:
    runs = by_run(CLIENTS)
    assert sum(map(len, runs)) == len(CLIENTS)
    assert {run[0].script for run in runs if len(run) > 1} >= {"openai_python.py"}
    assert ["langchain-openai"] in [[client.name for client in run] for run in runs]


def test_rows_that_were_tried_replace_their_own_in_a_table() -> None:
    one, two, three = CLIENTS[:3]
    tried = {name: Cell("pass") for name in MATRIX}
    first = {**tried, "tools": Cell("n/a", "it has: no tools | none")}
    old = table([Row(one, tried), Row(three, first, "0.1")])
    assert table(joined(old, [], CLIENTS, MATRIX)) == old
    rows = [Row(two, {**tried, "cancel": Cell("fail", "late")}), Row(one, first)]
    found = joined(old, rows, CLIENTS, MATRIX)
    assert [row.client for row in found] == [one, two, three]
    assert found[0].cells == first and found[2].version == "0.1"
    assert "2. openai (Python), cancel: late" in table(found)
