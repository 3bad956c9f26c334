"""What a key is told of models that it may not use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from router.errors import ModelForbidden, ModelNotFound
from router.fleet.engines.engine import ModelReplicas
from router.fleet.router import Router
from router.fleet.tenants.tenant import Tenant
from shared.settings import Settings
from tests.router.scripted_engine import make_hello

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


def join(router: Router, model: str) -> None:
    router.registry.models[model] = ModelReplicas(make_hello("one", model=model), Settings())


@pytest.mark.parametrize("name", ["a", "secret", "a:secret"])
@pytest.mark.parametrize("loaded", [None, "b", "a"])
def test_a_model_that_the_key_may_not_use_is_forbidden_loaded_or_not(
    router: Router, name: str, loaded: str | None
) -> None:
    if loaded is not None:
        join(router, loaded)
    assert router.unloaded_model(name, ALICE) is None
    with pytest.raises(ModelForbidden, match=f"The API key may not use {name}"):
        router.model_for(name, ALICE)


def test_an_unloaded_model_or_adapter_that_the_key_may_use_is_loaded(router: Router) -> None:
    for name, model in (("b", "b"), ("style", "a"), ("a:style", "a")):
        found = router.unloaded_model(name, ALICE)
        assert found is not None and found.names == [model]
    join(router, "b")
    with pytest.raises(ModelNotFound):
        router.model_for("nothing", ALICE)
