"""Models with the same tokenizer share it."""

from __future__ import annotations

import gc
import hashlib
import weakref
from pathlib import Path

from router.fleet.models.renderers import Renderers
from router.fleet.models.tokenizer_files import TokenizerFileStore
from shared.settings import parse
from tests.conftest import in_loop
from tests.router.chat_tokenizer import write_chat_tokenizer


@in_loop
async def test_a_tokenizer_is_loaded_once_for_all_models_that_have_it(tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path)
    store, files = TokenizerFileStore(tmp_path / "store"), {}
    for path in tmp_path.glob("*.json"):
        files[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        store.put(path.read_bytes(), [files[path.name]])
    renderers, settings = Renderers(store), parse([], {}, "test")
    other = parse(["--reasoning-parser=none"], {}, "test")
    first = await renderers.get(files, settings)
    assert await renderers.get(dict(files), settings) is first
    assert await renderers.get(files, other) is not first
    gone = weakref.ref(first)
    del first
    gc.unfreeze()
    gc.collect()
    assert gone() is None
    assert (await renderers.get(files, settings)).encode("abc")
