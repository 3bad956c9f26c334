"""What the registry does once the tokenizer of a model is loaded."""

from __future__ import annotations

import asyncio
import gc
import hashlib
from pathlib import Path

from router.fleet.engines.engine import Engine, ModelReplicas
from router.fleet.engines.registry import Registry
from router.fleet.models.tokenizer_files import TokenizerFileStore
from shared.settings import parse
from shared.wire import Files
from tests.router.scripted_engine import make_hello


class _Listener:
    def on_engine_lost(self, engine: Engine, reason: str) -> None: ...

    def on_capacity_changed(self, model: ModelReplicas) -> None: ...

    def on_engine_joined(self, engine: Engine) -> None: ...

    def on_engine_refused(self, reason: str) -> None: ...

    def on_model_replaced(self, model: ModelReplicas) -> None: ...

    def is_configured(self, model_id: str) -> bool:
        return False


def test_the_garbage_collector_does_not_look_at_what_a_tokenizer_needs(model_dir: Path) -> None:
    """It takes a tenth of a second with its libraries, and holds up the event loop."""
    contents = {path.name: path.read_bytes() for path in model_dir.iterdir() if path.is_file()}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}

    async def load() -> None:
        store = TokenizerFileStore(None)
        settings = parse([], {}, "test")
        registry = Registry(settings, "id", store, lambda *_: True, _Listener())
        registry.on_hello(b"peer", make_hello("engine", files=digests))
        registry.on_files(Files(names=list(contents)), list(contents.values()))
        while registry.models["tiny"].renderer is None:
            await asyncio.sleep(0.01)
        registry.close()

    gc.unfreeze()
    try:
        asyncio.run(asyncio.wait_for(load(), 60))
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
