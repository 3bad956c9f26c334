"""Tokenizer files from engines, stored by content so that equal files are sent once."""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from shared.wire import TOKENIZER_FILES

_DIGEST = re.compile(r"[0-9a-f]{64}")


class TokenizerFileStore:
    """A private directory of files named by their SHA-256. `close` removes it.

    Nothing else uses ``root``: files left there by a killed router are deleted. The default is a
    new temporary directory.
    """

    def __init__(self, root: Path | None = None) -> None:
        if root is not None:
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(mode=0o700)
        self._root = root or Path(tempfile.mkdtemp(prefix="mlxlm-router-"))

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    def missing(self, files: Mapping[str, str]) -> list[str]:
        """Return the names in ``files`` (name to digest) whose content is missing."""
        return [name for name, digest in files.items() if not (self._root / digest).exists()]

    def put(self, content: bytes, wanted: Container[str]) -> None:
        """Store ``content`` atomically if its actual digest is ``wanted``."""
        digest = hashlib.sha256(content).hexdigest()
        if digest in wanted:
            partial = self._root / f"{digest}.partial"
            partial.write_bytes(content)
            partial.replace(self._root / digest)

    @contextmanager
    def assembled(self, files: Mapping[str, str]) -> Iterator[Path]:
        """Provide a directory that contains ``files`` under their names. It is kept, unless what
        it is for fails."""
        directory = Path(tempfile.mkdtemp(prefix="model-", dir=self._root))
        try:
            for name, digest in files.items():
                (directory / name).symlink_to(self._root / digest)
            yield directory
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise


def acceptable_files(offered: Mapping[str, str]) -> dict[str, str]:
    """Return the ``offered`` files (name to digest) that a router accepts.

    A name must be in the fixed list and a digest well-formed, because both become parts of paths.
    """
    return {
        name: digest
        for name, digest in sorted(offered.items())
        if name in TOKENIZER_FILES and _DIGEST.fullmatch(digest)
    }
