"""Tokenizer files that engines gave, kept by content so that equal ones travel once."""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Container, Mapping
from pathlib import Path

from shared.wire import TOKENIZER_FILES

_DIGEST = re.compile(r"[0-9a-f]{64}")


class TokenizerFileStore:
    """A private directory of files named by their SHA-256; gone after `close`.

    ``root`` is this store's alone: what a router that was killed left there is removed.
    Without one it is a new temporary directory.
    """

    def __init__(self, root: Path | None = None) -> None:
        if root is not None:
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(mode=0o700)
        self._root = root or Path(tempfile.mkdtemp(prefix="mlxlm-router-"))

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    def missing(self, files: Mapping[str, str]) -> list[str]:
        """Those names of ``files`` (name to digest) whose content is not here."""
        return [name for name, digest in files.items() if not (self._root / digest).exists()]

    def put(self, content: bytes, wanted: Container[str]) -> None:
        """Keeps ``content`` when its real digest is one that is ``wanted``."""
        digest = hashlib.sha256(content).hexdigest()
        if digest in wanted:
            (self._root / digest).write_bytes(content)

    def assemble(self, files: Mapping[str, str]) -> Path:
        """A directory in which ``files`` lie under their names."""
        directory = Path(tempfile.mkdtemp(prefix="model-", dir=self._root))
        for name, digest in files.items():
            (directory / name).symlink_to(self._root / digest)
        return directory


def acceptable_files(offered: Mapping[str, str]) -> dict[str, str]:
    """Those of the ``offered`` files (name to digest) that a router takes: names of the
    fixed list with a real digest, since both become parts of paths."""
    return {
        name: digest
        for name, digest in sorted(offered.items())
        if name in TOKENIZER_FILES and _DIGEST.fullmatch(digest)
    }
