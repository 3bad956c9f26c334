"""`mlx-lm-server cache`: the directory is listed, checked, cleared and carried elsewhere."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.directory import BlockDirectory, BlockKey, block_path
from kvstore.store import DiskStore
from services.commands import cli
from shared.blockfile import encode
from shared.hashing import HASH_BYTES
from tests.kvstore.blocks import NAMESPACE, file_of, hash_of, key_of, payload_of

OTHER = "0b" * HASH_BYTES
Cache = Callable[..., Any]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with three blocks of one namespace and one of another."""
    root = tmp_path / "blocks"
    directory = BlockDirectory(root)
    for number in range(3):
        directory.write(key_of(number), file_of(number), 100.0 + number, durable=False)
    other = encode(hash_of(9), OTHER, payload_of(9))
    directory.write(BlockKey(OTHER, hash_of(9)), other, 50.0, durable=False)
    directory.close()
    return root


@pytest.fixture
def cache(capsys: pytest.CaptureFixture[str]) -> Cache:
    def run(command: str, root: Path, *words: str, code: int = 0) -> Any:
        assert cli.main(["cache", command, f"--ssd-cache-dir={root}", "--json", *words]) == code
        out, err = capsys.readouterr()
        return json.loads(out) if out else err

    return run


def test_blocks_are_listed_and_counted_beside_a_server_that_uses_them(
    root: Path, cache: Cache
) -> None:
    directory = BlockDirectory(root)
    try:
        listed = {one["namespace"]: one["blocks"] for one in cache("ls", root)["namespaces"]}
        assert listed == {NAMESPACE: 3, OTHER: 1}
        stats = cache("stats", root)
        assert (stats["blocks"], stats["namespaces"]) == (4, 2)
        assert cache("verify", root)["good"] == 4
        assert "a running server uses" in cache("clear", root, code=1)
        assert "use --url to clear it" in cache("clear", root, code=1)
    finally:
        directory.close()
    assert "does not exist" in cache("ls", root / "nowhere", code=1)


def test_a_bad_block_is_found(root: Path, cache: Cache) -> None:
    path = block_path(root, key_of(1))
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    found = cache("verify", root, code=1)
    assert found["bad"] == [f"{NAMESPACE}/{hash_of(1).hex()}"]
    assert found["good"] == 3


def test_blocks_of_one_namespace_are_cleared(root: Path, cache: Cache) -> None:
    assert cache("clear", root, "--namespace", OTHER)["removed"] == 1
    assert cache("stats", root)["blocks"] == 3
    assert cache("clear", root)["removed"] == 3
    assert cache("stats", root)["blocks"] == 0


def test_exported_blocks_are_imported_elsewhere(root: Path, cache: Cache, tmp_path: Path) -> None:
    archive, elsewhere = tmp_path / "blocks.tar", tmp_path / "elsewhere"
    assert cache("export", root, str(archive))["exported"] == 4
    assert cache("import", elsewhere, str(archive))["imported"] == 4
    assert cache("import", elsewhere, str(archive))["imported"] == 0
    assert block_path(elsewhere, key_of(2)).read_bytes() == file_of(2)
    store = DiskStore(BlockDirectory(elsewhere))
    store.load()
    assert store.has([key_of(0), key_of(1), key_of(2)]) == 3


def test_an_archive_cannot_write_anything_else(root: Path, cache: Cache, tmp_path: Path) -> None:
    archive = tmp_path / "evil.tar"
    name = f"{NAMESPACE}/{hash_of(5).hex()}"
    with tarfile.open(archive, "w") as tar:
        for member, content in (
            ("../../escaped", b"x"),
            ("/tmp/escaped", b"x"),
            (name, file_of(6)),
            (f"{NAMESPACE}/../{hash_of(5).hex()}", file_of(5)),
        ):
            info = tarfile.TarInfo(member)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo(f"{NAMESPACE}/{hash_of(7).hex()}")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    before = sorted(tmp_path.rglob("*"))
    found = cache("import", root, str(archive), code=1)
    assert (found["imported"], len(found["bad"])) == (0, 5)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "no.tar").write_text("nonsense")
    assert "is not an archive of blocks" in cache("import", root, str(tmp_path / "no.tar"), code=1)
    (tmp_path / "no.tar").write_bytes(gzip.compress(archive.read_bytes())[:-20])
    assert "is not an archive of blocks" in cache("import", root, str(tmp_path / "no.tar"), code=1)
    assert "is not a file name" in cache("export", root, "/", code=1)


def test_numbers_of_sparse_files_in_an_archive_may_be_nonsense(
    cache: Cache, tmp_path: Path
) -> None:
    archive = tmp_path / "sparse.tar"
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("a/b")
        info.pax_headers = {"GNU.sparse.map": "a,b"}
        tar.addfile(info)
    assert "is not an archive of blocks" in cache("import", tmp_path / "to", str(archive), code=1)


@pytest.mark.parametrize("used", ["inf", "nan", "-5", "1e300"])
def test_times_in_an_archive_may_be_nonsense(used: str, cache: Cache, tmp_path: Path) -> None:
    archive, elsewhere = tmp_path / "blocks.tar", tmp_path / "elsewhere"
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo(f"{NAMESPACE}/{hash_of(5).hex()}")
        info.size, info.pax_headers = len(file_of(5)), {"mtime": used}
        tar.addfile(info, io.BytesIO(file_of(5)))
    assert cache("import", elsewhere, str(archive))["imported"] == 1
    assert cache("ls", elsewhere)["namespaces"][0]["last_used"] == 0
