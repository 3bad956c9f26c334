"""The registry and the tokenizers of models: what it does once one is loaded, or cannot be."""

from __future__ import annotations

import asyncio
import errno
import gc
import hashlib
import tempfile
import time
from pathlib import Path

import pytest

from router.fleet.engines import registry as registry_module
from router.fleet.engines.engine import Engine, ModelReplicas
from router.fleet.engines.registry import Registry
from router.fleet.models.tokenizer_files import TokenizerFileStore
from shared.settings import parse
from shared.wire import Files
from tests.conftest import in_loop
from tests.router.conftest import until
from tests.router.scripted_engine import make_heartbeat, make_hello


class _Listener:
    def on_engine_lost(self, engine: Engine, reason: str) -> None: ...

    def on_capacity_changed(self, model: ModelReplicas) -> None: ...

    def on_engine_joined(self, engine: Engine) -> None: ...

    def on_engine_back(self, engine: Engine) -> None: ...

    def on_engine_refused(self, reason: str) -> None: ...

    def on_model_replaced(self, model: ModelReplicas) -> None: ...

    def is_configured(self, model_id: str) -> bool:
        return False


def contents_of(model_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in model_dir.iterdir() if path.is_file()}


def joined(contents: dict[str, bytes]) -> tuple[Registry, ModelReplicas]:
    """Return a registry with an engine that has sent its files."""
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    store, settings = TokenizerFileStore(None), parse([], {}, "test")
    registry = Registry(settings, "id", store, lambda *_: True, _Listener())
    registry.on_hello(b"peer", make_hello("engine", files=digests))
    registry.on_files(Files(names=list(contents)), list(contents.values()))
    return registry, registry.models["tiny"]


def test_the_garbage_collector_does_not_look_at_what_a_tokenizer_needs(model_dir: Path) -> None:
    """It takes a tenth of a second with its libraries, and holds up the event loop."""

    async def load() -> None:
        registry, model = joined(contents_of(model_dir))
        await until(lambda: model.renderer is not None)
        registry.close()

    gc.unfreeze()
    try:
        asyncio.run(asyncio.wait_for(load(), 60))
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


@in_loop
async def test_a_tokenizer_that_could_not_be_loaded_for_a_while_is_loaded_later(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[float] = []
    make_directory = tempfile.mkdtemp

    def fails_twice(prefix: str, dir: Path | None = None) -> str:
        if prefix == "model-":
            attempts.append(time.monotonic())
            if len(attempts) <= 2:
                raise OSError(errno.EMFILE, "Too many open files")
        return make_directory(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "mkdtemp", fails_twice)
    monkeypatch.setattr(registry_module, "_LOAD_RETRY_S", 0.2)
    registry, model = joined(contents_of(model_dir))
    saw_error = False
    while model.renderer is None:
        await asyncio.sleep(0.01)
        registry.on_heartbeat(b"peer", make_heartbeat("engine", "0", 0))
        saw_error |= "its tokenizer cannot be loaded" in model.troubles
    registry.close()
    first, second, third = attempts
    assert second - first >= 0.2 and third - second >= 0.4
    assert saw_error and model.troubles == []
