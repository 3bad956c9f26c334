"""Fingerprints of weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

HASHED_WHOLE_BYTES = 64 * 1024 * 1024
SAMPLES, SAMPLE_BYTES = 64, 64 * 1024


def digest(config: Path, weight_files: Iterable[Path]) -> str:
    """Return a hex name for the content of these files, the same on every machine.

    It covers all of ``config``, and the name, size, header and content of each weight file. Files
    over 64 MB are covered by 64 evenly spaced samples, because reading them completely would take
    minutes.
    """
    named = hashlib.sha256(config.read_bytes())
    for weights in weight_files:
        size = weights.stat().st_size
        named.update(f"\0{weights.name}\0{size}\0".encode())
        with weights.open("rb") as file:
            if size <= HASHED_WHOLE_BYTES:
                named.update(file.read())
                continue
            header = file.read(8)
            named.update(header + file.read(int.from_bytes(header, "little")))
            for sample in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                named.update(file.read(SAMPLE_BYTES))
    return named.hexdigest()
