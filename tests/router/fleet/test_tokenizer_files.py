from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from router.fleet.models.tokenizer_files import TokenizerFileStore

CONTENT = b"{}" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


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
