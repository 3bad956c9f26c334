"""Which model a request means, and what a key is told of models that it may not use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.model.context import context_length
from router.errors import InvalidRequest, ModelForbidden, ModelNotFound, NotSupported
from router.fleet.engines.engine import Model, ModelReplicas
from router.fleet.models.local_files import LocalFiles, read_local_files
from router.fleet.router import Router
from router.fleet.tasks import check_task, default_model
from router.fleet.tenants.tenant import EVERYBODY, Tenant
from router.ollama.models import list_models, shown_model
from router.ollama.names import served_name
from shared.settings import Settings
from tests.router.scripted_engine import adapter_ref, make_hello

ALICE = Tenant(name="alice", models=frozenset(["b", "style"]), alone=False)


@pytest.fixture
def router(socket_dir: Path) -> Iterator[Router]:
    """Yield a router whose supervisor has two models, neither of which is loaded."""
    router = Router(Settings(), [f"ipc://{socket_dir}/engines"], "test")
    models = {
        name: {"names": [name], "state": "unloaded", "adapters": adapters}
        for name, adapters in {"a": ["style", "secret"], "b": []}.items()
    }
    router.on_supervisor_message({"models": models})
    yield router
    for part in (router.registry, router.engine_sockets):
        part.close()


def join(router: Router, model: str, **hello: Any) -> ModelReplicas:
    joined = ModelReplicas(make_hello("one", model=model, **hello), Settings())
    router.registry.models[model] = joined
    return joined


@pytest.mark.parametrize("of_config", [True, False])
def test_files_tell_whether_a_model_can_insert(
    of_config: bool, router: Router, tmp_path: Path
) -> None:
    names = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "starcoder2"}))
    decoder = {str(number): {"content": name} for number, name in enumerate(names)}
    added = [{"id": number, "content": name} for number, name in enumerate(names)]
    config = {"added_tokens_decoder": decoder} if of_config else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = {"model": {"vocab": {"a": 3}}, "added_tokens": [] if of_config else added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    entry = {"names": ["me/b"], "state": "unloaded", "directory": str(tmp_path)}
    unset = {**entry, "names": ["unset"], "fim_layout": "none"}
    router.on_supervisor_message({"models": {"me/b": entry, "unset": unset}})
    asyncio.run(router.supervised.read_files())
    assert shown_model(router, "me/b").capabilities == ["completion", "insert"]
    layout = "<fim_prefix>{{ .Prompt }}<fim_suffix>{{ .Suffix }}<fim_middle>"
    assert layout in shown_model(router, "me/b").template
    assert shown_model(router, "unset").capabilities == ["completion"]
    assert not shown_model(router, "unset").template
    for broken in ('{"added_tokens_decoder": {"x": {"content": 5}}}', "[", '{"added_tokens": 5}'):
        for name in ("tokenizer_config.json", "tokenizer.json"):
            (tmp_path / name).write_text(broken)
        assert read_local_files(str(tmp_path)).fim_layout("auto") is None


def test_the_files_of_a_model_describe_it_before_its_first_load(
    router: Router, tmp_path: Path
) -> None:
    config: dict[str, Any] = {"model_type": "qwen3", "max_position_embeddings": 40_960}
    config |= {"quantization": {"bits": 4}, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ tools }}"}))
    entry = {"names": ["me/b"], "state": "unloaded", "directory": str(tmp_path)}
    gone = {**entry, "names": ["gone"], "directory": str(tmp_path / "gone")}
    seeing = {**entry, "names": ["seeing"], "takes_images": True}
    router.on_supervisor_message({"models": {"me/b": entry, "gone": gone, "seeing": seeing}})
    http: Any = SimpleNamespace(
        app=SimpleNamespace(state=SimpleNamespace(router=router)),
        state=SimpleNamespace(tenant=EVERYBODY),
    )
    first, second, third = json.loads(bytes(asyncio.run(list_models(http)).body))["models"]
    assert first["capabilities"] == ["completion", "decision", "tools"]
    assert (first["details"]["family"], first["details"]["quantization_level"]) == (
        *("qwen3", "4-bit"),
    )
    assert second["capabilities"] == ["completion"] and not second["details"]["family"]
    assert third["capabilities"] == ["completion", "decision", "tools", "vision"]
    shown = shown_model(router, "me/b")
    assert shown.template == "{{ tools }}"
    assert shown.model_info == {
        "general.architecture": "qwen3",
        "general.basename": "b",
        "qwen3.context_length": 40_960,
        "qwen3.embedding_length": 64,
    }
    (tmp_path / "config.json").write_text("{")
    router.on_supervisor_message({"models": {"me/b": {**entry, "state": "ready"}}})
    router.on_supervisor_message({"models": {"me/b": entry}})
    (first,) = json.loads(bytes(asyncio.run(list_models(http)).body))["models"]
    assert not first["details"]["family"], "the files are read again after a load"


def test_the_context_of_a_file_has_the_names_that_engines_know() -> None:
    config: dict[str, Any] = {"text_config": {"seq_length": 7}, "model_max_length": 9}
    assert LocalFiles(config).context_length == context_length(config) == 7


def test_ollamas_tag_is_no_part_of_a_name_unless_it_is_served_so(router: Router) -> None:
    for name in ("a", "a:secret", "secret"):
        assert router.model_names.served(f"{name}:latest") == name
    assert router.model_names.served("nobody:latest") == "nobody"
    join(router, "a:latest")
    assert router.model_names.served("a:latest") == "a:latest"
    join(router, "c:latest")
    assert router.model_names.served("c") == served_name(router, "hf.co/c") == "c:latest"
    found = router.unloaded_model("b:latest", ALICE)
    assert found is not None and found.names == ["b"]


@pytest.mark.parametrize("name", ["a", "secret", "a:secret"])
@pytest.mark.parametrize("loaded", [None, "b", "a"])
def test_a_model_that_the_key_may_not_use_is_forbidden_loaded_or_not(
    router: Router, name: str, loaded: str | None
) -> None:
    if loaded is not None:
        join(router, loaded)
    for find in (router.unloaded_model, router.model_for):
        with pytest.raises(ModelForbidden, match=f"The API key may not use {name}"):
            find(name, ALICE)


def test_an_unloaded_model_or_adapter_that_the_key_may_use_is_loaded(router: Router) -> None:
    for name, model in (("b", "b"), ("style", "a"), ("a:style", "a")):
        found = router.unloaded_model(name, ALICE)
        assert found is not None and found.names == [model]
    join(router, "b")
    with pytest.raises(ModelNotFound):
        router.model_for("nothing", ALICE)


@pytest.mark.parametrize("configured", [True, False])
def test_the_default_is_a_model_that_the_key_may_use(router: Router, configured: bool) -> None:
    if not configured:
        router.on_supervisor_message({"models": {}})
        assert router.model_names.wanted(None, ALICE) is None
    join(router, "a")
    if not configured:
        with pytest.raises(ModelForbidden, match=r"may not use the default model\.$"):
            router.model_for(None, ALICE)
    join(router, "b")
    assert router.model_names.wanted(None, ALICE) == "b"
    assert router.model_names.wanted(None, Tenant()) == "a"


def test_errors_about_tasks_name_only_models_that_the_key_may_use(router: Router) -> None:
    chat = cast(Model, join(router, "b"))
    join(router, "a", task="embed")
    with pytest.raises(InvalidRequest, match="No such model is loaded here"):
        default_model("embed", router, ALICE)
    join(router, "z", aliases=["style"], task="embed")
    assert default_model("embed", router, ALICE) == "z"
    assert default_model("embed", router, Tenant()) == "a"
    with pytest.raises(NotSupported, match=r"Use z instead\.$"):
        check_task(chat, "embed", router, ALICE)


def test_of_adapters_of_one_name_only_those_count_that_the_key_may_use(router: Router) -> None:
    """Neither a choice nor an error tells a key of others."""
    models = {
        name: {"names": [name], "state": "unloaded", "adapters": adapters}
        for name, adapters in {"a": ["tone"], "b": ["tone"], "c": ["tone"]}.items()
    }
    router.on_supervisor_message({"models": models})
    one, two = Tenant(models=frozenset(["b"])), Tenant(models=frozenset(["b", "c"]))
    for loaded in ("", "a", "b"):
        if loaded:
            join(router, loaded).adapters["tone"] = adapter_ref("tone")
        assert router.model_names.wanted("tone", one) == "b:tone"
        for find in (router.unloaded_model, router.model_for):
            with pytest.raises(
                ModelNotFound, match=r"several models: (b:tone, c|c:tone, b):tone\."
            ):
                find("tone", two)
            with pytest.raises(ModelForbidden, match="may not use tone"):
                find("tone", Tenant(models=frozenset(["d"])))
    assert router.unloaded_model("tone", Tenant(models=frozenset(["c"]))) is not None
