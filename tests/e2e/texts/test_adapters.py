"""A server with adapters that requests name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.e2e.server import Server, assert_error, at_once, serving, text_of
from tests.oracle import Oracle
from tests.router.batches.conftest import BatchClient, line
from tests.tiny_models import make_adapter

pytestmark = pytest.mark.slow

PROMPT = "it is that they have this one on the way to be at"
ADMIN = {"authorization": "Bearer boss"}
TOKENS = 24


class Served(NamedTuple):
    server: Server
    model: Path
    paths: dict[str, Path]

    def text(self, name: str) -> str:
        return self.server.text(PROMPT, TOKENS, ignore_eos=True, model=name)

    def change(self, what: str, **body: Any) -> httpx.Response:
        return self.server.client.post(f"/admin/adapters/{what}", json=body, headers=ADMIN)

    def load(self, name: str) -> None:
        answer = self.change("load", name=name, path=str(self.paths[name]))
        assert answer.status_code == 200, answer.text

    def names(self) -> list[str]:
        answer = self.server.client.get("/v1/models", timeout=10)
        return [card["id"] for card in answer.json()["data"]]

    def check(self, name: str, found: str) -> None:
        """Compare a text with that of mlx-lm with this adapter alone."""
        truth = Oracle(self.model, self.paths.get(name.removeprefix("base:")))
        truth.check(truth.tokenizer.encode(PROMPT), TOKENS, found)


@pytest.fixture(scope="module")
def served(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    model, folder = tiny_model("llama"), tmp_path_factory.mktemp("adapters")
    paths = {name: make_adapter(model, folder / name, seed) for seed, name in enumerate("abcd")}
    flags = ["--served-model-name=base", "--admin-key=boss", "--max-adapters=2"]
    flags += [f"--batch-dir={folder}/batches", *(f"--adapter={n}={paths[n]}" for n in "ab")]
    with serving(model, *flags) as server:
        yield Served(server, model, paths)


def test_requests_with_different_adapters_run_together_and_each_is_right(served: Served) -> None:
    assert_error(served.server.post("/v1/completions", model="base:c", prompt="a"), 404)
    at_once(served.load, "cc")  # loaded twice
    assert_error(served.change("load", name="e", path=str(served.model)), 400)
    assert_error(served.change("load", name="base", path=str(served.paths["c"])), 400)
    names = ["base", "a", "base:b", "c"] * 3
    texts = at_once(served.text, names)
    for name, found in zip(names, texts, strict=True):
        served.check(name, found)
    assert len(set(texts)) == 4
    assert {"base:a", "base:b", "base:c"} < set(served.names())
    served.server.wait_metric("mlx_lm_server_adapter_swaps_total")  # three, and two places


def test_a_line_of_a_batch_names_an_adapter(served: Served) -> None:
    client, names = BatchClient(served.server.url), ("base:a", "base")
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS}
    body |= {"temperature": 0, "ignore_eos": True}
    batch = client.create([line(name, model=name, **body) for name in names])
    done = client.lines(client.wait(batch, 90).output_file_id)
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in done}
    assert texts == {name: served.text(name) for name in names}


def test_a_stream_ends_as_it_began_though_its_adapter_is_unloaded_and_its_folder_gone(
    served: Served, tmp_path: Path
) -> None:
    shutil.copytree(served.paths["d"], tmp_path / "d")
    answer = served.change("load", name="d", path=str(tmp_path / "d"))
    assert answer.status_code == 200, answer.text
    events = served.server.stream(PROMPT, TOKENS, model="d")
    begun = [next(events)]
    assert served.change("unload", name="d").status_code == 200
    assert_error(served.server.post("/v1/completions", model="d", prompt="a"), 404)
    shutil.rmtree(tmp_path / "d")
    served.check("d", text_of([*begun, *events]))


def test_adapters_of_an_administrator_survive_kills_of_the_engine_and_of_the_router(
    served: Served,
) -> None:
    served.load("c")
    before = served.text("c")
    served.server.kill("engine")
    assert served.text("c") == before
    served.server.kill("router")
    served.server.wait_until(served.server.is_ready, 60, "the router")
    served.server.wait_until(lambda: "base:c" in served.names(), 30, "the adapter's name")
    assert served.text("c") == before
    assert served.change("unload", name="c").status_code == 200
    assert "base:c" not in served.names()
