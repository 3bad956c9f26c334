"""Which adapter a name stands for, while models are loaded on demand and engines come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from router.errors import ModelForbidden, ModelNotFound
from router.fleet.adapters import Adapters, ServedAdapter
from router.fleet.engines.engine import Engine, ModelReplicas
from router.fleet.model_names import ModelNames
from router.fleet.models.supervised import Supervised
from router.fleet.tenants.tenant import Tenant
from shared.settings import Settings
from shared.wire import AdapterChecked, AdapterDecisions, AdapterRef, CheckAdapter, Message
from tests.router.scripted_engine import adapter_ref as ref
from tests.router.scripted_engine import make_hello


class Fleet:
    """Models with engines, and models of the configuration that are not loaded."""

    def __init__(self, **configured: Sequence[str]) -> None:
        """``configured`` are the adapters of models that are loaded on demand."""
        self.models: dict[str, ModelReplicas] = {}
        self.versions: list[ModelReplicas] = []
        self.sent: list[tuple[str, Message]] = []
        supervised = Supervised(None)
        models = {
            name: {"names": [name], "state": "unloaded", "adapters": list(adapters)}
            for name, adapters in configured.items()
        }
        supervised.on_models({"models": models})
        registry: Any = SimpleNamespace(
            models=self.models, versions=self.versions, find_model=self.models.get
        )
        self.adapters = Adapters(registry, supervised, self._send)
        self.names = ModelNames(registry, supervised, self.adapters)

    def _send(self, engine: Engine, message: Message) -> bool:
        self.sent.append((engine.name, message))
        return True

    def version(self, name: str) -> ModelReplicas:
        """Add a version of the model ``name``, which takes the place of any before it."""
        self.models[name] = ModelReplicas(make_hello("first", model=name), Settings())
        self.versions.append(self.models[name])
        return self.models[name]

    def join(self, model: ModelReplicas, name: str, *adapters: AdapterRef) -> Engine:
        hello = make_hello(name, model=model.id, adapters=list(adapters), max_adapters=2)
        engine = Engine(b"peer", hello, name, 10.0)
        model.engines.append(engine)
        model.update_adapters()
        self.adapters.on_engine_joined(engine)
        return engine

    def found(self, name: str) -> ServedAdapter:
        served = self.adapters.find(name)
        assert served is not None
        return served


def test_a_bare_name_of_two_models_is_refused_whichever_of_them_are_loaded() -> None:
    fleet = Fleet(one=["same", "own"], two=["same"])
    for loaded in ("", "one", "two"):
        if loaded:
            fleet.join(fleet.version(loaded), "engine", ref("same"))
        for find in (fleet.adapters.find, fleet.adapters.find_configured):
            with pytest.raises(ModelNotFound, match=r"one:same.*two:same|two:same.*one:same"):
                find("same")
    assert fleet.found("two:same").model.id == "two"


def test_a_full_name_finds_the_model_that_is_to_be_loaded() -> None:
    fleet = Fleet(one=["same"], two=["same", "own"])
    for name in ("two:same", "own", "two:own"):
        found = fleet.adapters.find_configured(name)
        assert found is not None and found.names == ["two"]
        assert fleet.adapters.find(name) is None


@pytest.mark.parametrize(
    ("allowed", "name", "may"),
    [
        ("own", "own", True),
        ("two:own", "own", True),
        ("two", "two:own", True),
        ("own", "two:own", True),
        ("own", "two", False),
        ("own", "same", False),
        ("one:own", "own", False),
    ],
)
def test_an_adapters_key_loads_the_model_for_it_alone(allowed: str, name: str, may: bool) -> None:
    fleet = Fleet(two=["same", "own"])
    tenant = Tenant(name="alice", models=frozenset([allowed]), alone=False)
    with nullcontext() if may else pytest.raises(ModelForbidden):
        fleet.names.wanted(name, tenant)


def test_an_adapter_that_left_the_flags_has_no_name_once_the_last_engine_is_replaced() -> None:
    fleet = Fleet()
    model = fleet.version("one")
    old = [fleet.join(model, f"old {number}", ref("gone"), ref("kept")) for number in range(2)]
    fleet.adapters._decide(model, "loaded", ref("loaded"))
    for number, engine in enumerate(old):
        model.engines.remove(engine)
        assert "gone" in model.adapters  # while no engine is there, requests wait for it
        fleet.join(model, f"new {number}", ref("kept", "new"))
    assert model.adapters == {"kept": ref("kept", "new"), "loaded": ref("loaded")}


def test_a_decision_during_a_rolling_restart_holds_in_both_versions_of_the_model() -> None:
    fleet, loaded = Fleet(), ref("loaded")
    old = fleet.version("one")
    fleet.join(old, "old", ref("flag"))
    new = fleet.version("one")  # same weights, other flags
    fleet.join(new, "new", ref("flag"))
    fleet.adapters._decide(new, "loaded", loaded)
    fleet.adapters.unload("flag")
    assert old.adapters == new.adapters == {"loaded": loaded}
    told = dict(fleet.sent)
    for name in ("old", "new"):
        message = told[name]
        assert isinstance(message, AdapterDecisions)
        decided = {one.name: one.adapter for one in message.decisions}
        assert decided == {"loaded": loaded, "flag": None}
    late = fleet.join(new, "late", ref("flag"))
    assert new.adapters == {"loaded": loaded}
    assert fleet.sent[-1][0] == late.name


def test_the_late_answer_of_a_check_is_not_taken_for_that_of_the_next() -> None:
    fleet = Fleet()
    model = fleet.version("one")
    engine = fleet.join(model, "engine")

    async def load_twice() -> ServedAdapter:
        first = asyncio.create_task(fleet.adapters.load("new", "/new", "one"))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(fleet.adapters.load("new", "/new", "one"))
        await asyncio.sleep(0)
        asked: list[Any] = [one for _, one in fleet.sent if isinstance(one, CheckAdapter)]
        assert len(asked) == 2
        for question, digest in zip(asked, ("before", "now"), strict=True):
            answer = AdapterChecked(
                name="new", path="/new", number=question.number, adapter=ref("new", digest)
            )
            fleet.adapters.on_checked(engine, answer)
        return await second

    assert asyncio.run(load_twice()).adapter.digest == "now"
