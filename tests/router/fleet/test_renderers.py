"""The tokenizers of models: shared, and loaded with all that is in their files."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from router.fleet.models.renderers import Renderers
from router.fleet.models.tokenizer_files import TokenizerFileStore, acceptable_files
from shared.settings import parse
from tests.conftest import in_loop
from tests.router.chat_tokenizer import write_chat_tokenizer

CONTENT = b"{}" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def stored(directory: Path) -> tuple[TokenizerFileStore, dict[str, str]]:
    """Return a store with the files in ``directory``, and their names and digests."""
    store, files = TokenizerFileStore(directory / "store"), {}
    for path in directory.glob("*.json"):
        files[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        store.put(path.read_bytes(), [files[path.name]])
    return store, files


@in_loop
async def test_a_tokenizer_is_loaded_once_for_all_models_that_have_it(tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path)
    store, files = stored(tmp_path)
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


@in_loop
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
async def test_a_file_that_cannot_be_read_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The model would end its answers elsewhere, or always take the likeliest token."""
    write_chat_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    store, files = stored(tmp_path)
    renderers, settings = Renderers(store), parse([], {}, "test")
    read_text = Path.read_text

    def fails(path: Path, *args: Any, **named: Any) -> str:
        if path.name == name:
            raise OSError(errno.EMFILE, "Too many open files")
        return read_text(path, *args, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", fails)
        with pytest.raises(OSError, match="Too many"):
            await renderers.get(files, settings)
    assert not list((tmp_path / "store").glob("model-*"))
    assert (await renderers.get(files, settings)).sampling_defaults.temperature == 0.5


@in_loop
async def test_a_processors_template_is_used_if_the_tokenizer_has_none(tmp_path: Path) -> None:
    """As in older multimodal checkpoints."""
    write_chat_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    template = config.pop("chat_template")
    settings = parse([], {}, "test")

    async def template_of(name: str, **files: str) -> str:
        for file, text in files.items():
            (tmp_path / f"{file}.json").write_text(text)
        store, found = stored(tmp_path)
        renderer = await Renderers(store).get(found, settings)
        assert ("chat" in renderer.capabilities) is bool(renderer.chat_template), name
        return renderer.chat_template

    other = json.dumps({"chat_template": "other"})
    assert await template_of("both", chat_template=other) == template
    without = json.dumps(config)
    assert await template_of("processor", tokenizer_config=without) == "other"
    broken = json.dumps({"chat_template": ["other"]})
    assert await template_of("neither", chat_template=broken) == ""


def test_only_listed_names_and_wanted_contents_are_taken_from_an_engine(tmp_path: Path) -> None:
    """Both names become parts of paths."""
    offered = {"tokenizer.json": DIGEST, "../config.json": DIGEST, "code.py": DIGEST}
    assert acceptable_files({**offered, "config.json": "../x"}) == {"tokenizer.json": DIGEST}
    store = TokenizerFileStore(tmp_path / "files")
    store.put(b"other", [DIGEST])
    assert not list((tmp_path / "files").iterdir())


def test_a_file_written_in_part_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TokenizerFileStore(tmp_path / "files")
    write = Path.write_bytes

    def full_disk(path: Path, content: bytes) -> int:
        write(path, content[:10])
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full_disk)
        with pytest.raises(OSError, match="No space"):
            store.put(CONTENT, [DIGEST])
    assert store.missing({"tokenizer.json": DIGEST}) == ["tokenizer.json"]
    store.put(CONTENT, [DIGEST])
    assert store.missing({"tokenizer.json": DIGEST}) == []
    with store.assembled({"tokenizer.json": DIGEST}) as directory:
        pass
    assert (directory / "tokenizer.json").read_bytes() == CONTENT
