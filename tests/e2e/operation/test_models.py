"""A server of several models: settings of each, loading on demand, models that cannot be loaded."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.commands import cli
from tests.e2e.server import Server, assert_error, at_once, serving
from tests.stand_ins.hub import Hub

PATIENCE_S = 60.0
MODEL = """
[[model]]
id = "{id}"
path = "{path}"
memory_gb = 0.1
"""


class Models:
    """A running server, and its file."""

    def __init__(self, server: Server, file: Path) -> None:
        self.server = server
        self.file = file

    def _health(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.server.client.get("/health").json()["models"]
        return found

    @property
    def states(self) -> dict[str, str]:
        return {model["id"]: model["state"] for model in self._health()}

    def engines_of(self, model_id: str) -> list[str]:
        found = [model["engines"] for model in self._health() if model["id"] == model_id]
        return [engine["name"] for engines in found for engine in engines]

    def ask(self, model: str) -> str:
        return self.server.text("abc", 8, model=model, ignore_eos=True)

    def reload(self, content: str) -> None:
        self.file.write_text(content)
        self.server.process.send_signal(signal.SIGHUP)

    def wait_for(self, **states: str) -> None:
        self.server.wait_until(
            lambda: self.states.items() >= states.items(), PATIENCE_S, f"{states}"
        )


@pytest.fixture(scope="module")
def content(tiny_model: Callable[..., Path]) -> str:
    path = tiny_model("llama")
    return (
        "fleet_memory_gb = 0.2\nnum_blocks = 64\n"
        + MODEL.format(id="org/a", path=path)
        + 'aliases = ["first"]\npinned = true\nmax_generation_tokens = 600\n'
        + "chat_template = \"{% for m in messages %}A:{{ m['content'] }}{% endfor %}\"\n"
        + MODEL.format(id="b", path=path)
        + MODEL.format(id="c", path=tiny_model("llama", 1))
        + MODEL.format(id="broken", path="/nowhere/at/all")
    )


@pytest.fixture(scope="module")
def models(content: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    file = tmp_path_factory.mktemp("models") / "server.toml"
    file.write_text(content)
    flags = ("--config", str(file), "--kv-bits", "16", "--admin-key", "boss")
    with serving(None, *flags) as server:
        yield Models(server, file)


def test_models_are_loaded_at_the_start_or_on_demand_and_the_oldest_makes_room(
    models: Models,
) -> None:
    models.wait_for(**{"org/a": "ready", "b": "ready"})
    assert models.states["c"] == "unloaded"
    texts = {name: models.ask(name) for name in ("org/a", "b")}
    assert texts["org/a"] == texts["b"], "the same weights"
    (text,) = set(at_once(models.ask, ["c"] * 3))  # they wait until it is loaded
    assert text != texts["b"]
    states = {"org/a": "ready", "b": "unloaded", "c": "ready", "broken": ""}
    assert models.states | {"broken": ""} == states
    assert len(models.server.pids("services.processes.engine")) <= 2


def test_more_models_than_fit_are_all_answered_in_turn_and_nothing_swaps(models: Models) -> None:
    before = loads(models.server)
    first = {name: models.ask(name) for name in ("org/a", "b", "c")}
    assert {name: models.ask(name) for name in ("org/a", "b", "c")} == first
    assert len(models.server.pids("services.processes.engine")) <= 2
    assert swapped_kb(models.server) == 0
    assert loads(models.server) - before >= 3, "two had to be loaded again and again"


def loads(server: Server) -> int:
    return sum("was loaded in" in line for line in server.log)


def swapped_kb(server: Server) -> int:
    """Return what of the server's processes is on a swap device; 0 where Linux does not tell."""
    total = 0
    for pid in server.pids():
        path = Path(f"/proc/{pid}/status")
        if path.exists():
            lines = [line.split() for line in path.read_text().splitlines()]
            total += sum(int(line[1]) for line in lines if line and line[0] == "VmSwap:")
    return total


def test_settings_go_by_model(models: Models) -> None:
    server = models.server
    assert models.ask("first") == models.ask("org/a")
    chat = {"messages": [{"role": "user", "content": "x"}]}
    counts = {
        name: server.post("/tokenize", model=name, **chat).json()["tokens"]
        for name in ("org/a", "c")
    }
    assert counts["org/a"] != counts["c"], "the template is its own"
    long = {"prompt": "abc", "max_tokens": 601, "ignore_eos": True}
    for name, most in (("org/a", 600), ("c", 601)):
        usage = server.post("/v1/completions", model=name, **long).json()["usage"]
        assert usage["completion_tokens"] == most
    metrics = server.client.get("/metrics").text
    for name in ("org/a", "c"):
        count = f'mlx_lm_server_time_to_first_token_seconds_count{{model="{name}"}}'
        assert count in metrics


def test_a_model_that_cannot_be_loaded_says_why_and_the_others_are_served(models: Models) -> None:
    server = models.server
    answer = server.post("/v1/completions", model="broken", prompt="abc")
    error = assert_error(answer, 503, "model_broken")
    assert "/nowhere/at/all" in error["message"]
    ready = server.client.get("/readyz")
    assert ready.status_code == 200
    assert any("broken" in reason for reason in ready.json()["reasons"])
    assert server.client.get("/health").json()["status"] == "degraded"
    cards = {card["id"]: card for card in server.client.get("/v1/models").json()["data"]}
    assert cards["broken"]["state"] == "broken"
    assert cards["broken"]["context_length"] is None
    assert {"org/a", "first", "b", "c"} <= cards.keys()
    assert_error(server.post("/v1/completions", model="none", prompt="abc"), 404)


def test_the_file_is_read_again_on_sighup(models: Models, content: str) -> None:
    server = models.server

    def refuse(line: str) -> None:
        server.wait_until(lambda: any(line in each for each in server.log), PATIENCE_S, line)

    models.reload(content.replace('id = "broken"', 'id = "b"'))
    refuse("the model name 'b' is used twice")
    models.reload("x = " + 100_000 * "[")
    refuse("is not valid TOML: ")
    models.reload(content.replace("/nowhere/at/all", "/nowhere\\u0000"))
    refuse("path of [[model]] number 4")
    models.reload("")
    refuse("has no [[model]] any more")
    assert set(models.states) == {"org/a", "b", "c", "broken"}, "nothing has changed"
    models.ask("c")  # so that there is no room for another one
    models.reload(content.replace('id = "broken"', 'id = "d"').replace("/nowhere/at/all", "demo"))
    models.wait_for(d="unloaded")
    assert "broken" not in models.states


def test_a_model_that_was_unloaded_is_no_problem_but_status_lists_it(
    models: Models, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    models.reload(content.partition('\n[[model]]\nid = "broken"')[0])
    models.ask("c")  # takes the room of another one
    models.wait_for(c="ready", b="unloaded")
    assert models.server.client.get("/health").json()["reasons"] == []
    assert cli.main(["status", "--once", f"--url={models.server.url}"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["b", "-", "unloaded", "-", "-", "0"] in lines


def test_new_weights_come_under_one_name_and_go_back(
    models: Models, content: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """By another path in the file, by other files at the same path, and by the file as it was."""
    own = shutil.copytree(tiny_model("llama", 1), tmp_path / "own")
    third = tiny_model("llama", 2)
    models.reload(content)
    seen = [models.ask("b")]

    def has_another_text() -> bool:
        text = models.ask("b")
        if text in seen:
            return False
        seen.append(text)
        return True

    entry = 'id = "b"\npath = "{}"'
    moved = content.replace(entry.format(tiny_model("llama")), entry.format(own))
    assert moved != content
    models.reload(moved)
    models.server.wait_until(has_another_text, PATIENCE_S, "the other path")
    shutil.copy(third / "model.safetensors", own / "new")
    (own / "new").replace(own / "model.safetensors")
    models.server.wait_until(lambda: len(models.engines_of("b")) == 1, PATIENCE_S, "one engine")
    (engine,) = models.engines_of("b")
    url = f"--url={models.server.url}"
    assert cli.main(["restart", engine, "--wait", url, "--admin-key=boss"]) == 0
    models.server.wait_until(has_another_text, PATIENCE_S, "the other files")
    models.reload(content)
    models.server.wait_until(lambda: models.ask("b") == seen[0], PATIENCE_S, "as it was")


def test_a_broken_model_is_mended(
    models: Models, content: str, tiny_model: Callable[..., Path]
) -> None:
    models.reload(content)
    models.wait_for(broken="unloaded")  # it is tried again
    assert_error(models.server.post("/v1/completions", model="broken", prompt="abc"), 503)
    models.wait_for(broken="broken")
    models.reload(content.replace("/nowhere/at/all", str(tiny_model("llama", 2))))
    models.server.wait_until(lambda: models.states["broken"] != "broken", PATIENCE_S, "mended")
    assert models.ask("broken")


def test_a_model_whose_hub_fails_is_loading_with_a_reason_until_it_can_be_loaded(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = tiny_model("llama")
    hub = Hub(path)
    hub.fails = 503
    file = tmp_path / "server.toml"
    file.write_text(MODEL.format(id="here", path=path) + MODEL.format(id="far", path="me/tiny"))
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    flags = ("--config", str(file), "--no-ssd")
    try:
        with serving(None, *flags, **variables, TEST_FORKS="0") as server:
            models = Models(server, file)
            models.wait_for(here="ready", far="loading")

            def reason() -> str:
                return next(m["reason"] or "" for m in models._health() if m["id"] == "far")

            server.wait_until(lambda: "(trying again)" in reason())
            answer = server.post("/v1/completions", model="far", prompt="a", max_tokens=1)
            assert answer.status_code == 503 and "trying again" in answer.text
            assert "retry-after" in answer.headers
            assert models.ask("here")
            hub.fails = 0
            models.wait_for(far="ready")
            assert not reason()
            assert models.ask("far")
    finally:
        hub.shutdown()
        hub.server_close()
