"""The recipes of docs/operations.md: each is run by a test, here or where its server is."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.e2e.operation import test_administration, test_faults, test_models, test_rolling
from tests.e2e.process import ROOT, Process, running_process, wait_until
from tests.forked.process import FORKS_VARIABLE

PATIENCE_S = 60.0
FLAGS = ("--host=127.0.0.1", "--port=0", "--kv-bits=16", "--disk-reserve-gb=0", "--num-blocks=64")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the home of a user who starts two servers."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def two_servers(
    home: Path, tiny_model: Callable[..., Path]
) -> Iterator[tuple[Process, httpx.Client, Process, httpx.Client]]:
    """Two servers that know nothing of each other; the second has a delay before it stops."""
    model = f"--model={tiny_model('llama')}"
    flags = ("mlx_lm_server", model, *FLAGS)
    own = {"HOME": str(home), FORKS_VARIABLE: "1"}  # no process looks for models there
    with ExitStack() as stack:
        first = stack.enter_context(running_process(*flags, **own))
        second = Process(*flags, "--pre-stop-delay-s=120", **own)
        stack.callback(second.popen.kill)
        clients = []
        for server in (first, second):
            url = server.wait_for(r"ready: (http://\S+)")[1]
            clients.append(stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE_S)))
        yield first, clients[0], second, clients[1]


def complete(client: httpx.Client) -> str:
    body = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_a_second_server_on_the_machine_finds_its_own_places(
    two_servers: tuple[Process, httpx.Client, Process, httpx.Client], home: Path
) -> None:
    first, client, second, other_client = two_servers
    assert complete(client) == complete(other_client)
    places = {each.wait_for(r"storing blocks in (\S+)")[1] for each in (first, second)}
    cache = home / ".cache" / "mlx-lm-server"
    assert places == {str(cache / "kv-cache"), str(cache / "kv-cache-2")}


def test_a_server_goes_on_after_the_signal_until_load_balancers_have_gone_elsewhere(
    two_servers: tuple[Process, httpx.Client, Process, httpx.Client],
) -> None:
    """It stands last: the second server ends."""
    _, _, server, client = two_servers
    assert client.get("/readyz").status_code == 200
    server.popen.send_signal(signal.SIGTERM)
    wait_until(lambda: client.get("/readyz").status_code != 200, server)
    assert complete(client)
    server.popen.send_signal(signal.SIGTERM)
    assert server.popen.wait(PATIENCE_S) == 128 + signal.SIGTERM


RECIPES = {
    "add, remove or change a model": test_models.test_the_file_is_read_again_on_sighup,
    "replace weights under one name": test_models.test_new_weights_come_under_one_name_and_go_back,
    "restart all engines without cutting a request": (
        test_administration.test_a_restart_breaks_no_stream
    ),
    "roll back a bad version": (test_models.test_new_weights_come_under_one_name_and_go_back),
    "recover a broken model": test_models.test_a_broken_model_is_mended,
    "keep one model always loaded": (
        test_models.test_models_are_loaded_at_the_start_or_on_demand_and_the_oldest_makes_room
    ),
    "run more models than fit": (
        test_models.test_models_are_loaded_at_the_start_or_on_demand_and_the_oldest_makes_room
    ),
    "run a second server on the machine": test_a_second_server_on_the_machine_finds_its_own_places,
    "replace the router": (
        test_faults.test_a_router_that_is_replaced_finishes_its_streams_and_leaves_connections
    ),
    "stop behind a load balancer": (
        test_a_server_goes_on_after_the_signal_until_load_balancers_have_gone_elsewhere
    ),
    "let a Mac sleep, or suspend the server (Ctrl-Z, `docker pause`)": (
        test_rolling.test_time_while_suspended_does_not_count
    ),
}
"""What a recipe is for -> the test that runs it."""


def test_every_recipe_is_run_by_a_test() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = page.partition("\n### Recipes\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \|", section, re.MULTILINE)
    assert rows[0] == "to"
    assert rows[1:] == list(RECIPES)
    assert all(callable(test) for test in RECIPES.values())
