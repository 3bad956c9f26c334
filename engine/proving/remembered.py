"""Successful proofs, stored on disk so that a restart on the same machine need not repeat them.

A record says which class of batches was proven, and for which layout. Its name is a digest of
everything on which the proof depends, so records for anything else are not found.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import msgspec

import engine
from engine.backend.blas import load_fast_blas
from engine.backend.kept_files import keep, remove
from engine.backend.threads import num_threads
from engine.cache.layout import AttentionLayout, KVNode, Layout, Node, StateLayout, StateNode
from engine.cache.quantization import Precision
from engine.device import HOST_VARIABLE

logger = logging.getLogger(__name__)

PACKAGES = ("mlx", "mlx-lm", "mlx-metal", "numpy", "onnx", "onnxruntime", "transformers")
PROCESSOR = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features")
"""The fields of Linux's description of a processor that stay the same, on x86-64 and arm64."""

CHANGING = ("free_memory", "pci_bus_id", "uuid")
"""The fields of MLX's description of a GPU that a later start, or the same model of GPU, need not
share."""


class ProvenBatches(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a proof."""

    batch: str  # the name of the class of batches
    layers: tuple[AttentionLayout, ...]
    states: tuple[StateLayout, ...]
    tree: list[Any]  # `Layout.tree`: a layer's number, numbers of states, or a list of these
    precision: Precision
    reason: str  # from `ChosenExecutor`, like the next
    unquantized: str

    @classmethod
    def of(cls, batch: type, layout: Layout, reason: str, unquantized: str) -> ProvenBatches:
        return cls(
            batch=batch.__name__,
            layers=layout.layers,
            states=layout.states,
            tree=[_plain(node) for node in layout.tree],
            precision=layout.precision,
            reason=reason,
            unquantized=unquantized,
        )

    @property
    def layout(self) -> Layout:
        tree = tuple(_node(each) for each in self.tree)
        return Layout(self.layers, self.states, tree, self.precision)

    def encode(self) -> bytes:
        return msgspec.json.encode(self, enc_hook=str)

    @classmethod
    def decode(cls, encoded: bytes) -> ProvenBatches:
        """Raises: ValueError, msgspec.MsgspecError."""
        return msgspec.json.decode(encoded, type=cls, dec_hook=_of_json)


class Record(Protocol):
    """Where a proof is stored."""

    def read(self) -> ProvenBatches | None:
        """Return the stored proof."""

    def write(self, proven: ProvenBatches) -> None:
        """Store ``proven``."""


class AgreedRecord:
    """Rank 0's stored proof, for all ranks of a group: either all use it, or none."""

    def __init__(self, found: ProvenBatches | None, own: Record | None = None) -> None:
        """``own`` is where rank 0 stores a new proof."""
        self._found, self._own = found, own

    def read(self) -> ProvenBatches | None:
        return self._found

    def write(self, proven: ProvenBatches) -> None:
        if self._own is not None:
            self._own.write(proven)

    def encode(self) -> bytes:
        return b"" if self._found is None else self._found.encode()

    @classmethod
    def decode(cls, encoded: bytes) -> AgreedRecord:
        return cls(ProvenBatches.decode(encoded) if encoded else None)


class ProofRecord:
    """The file in ``folder`` for one model with its settings, as this process computes it."""

    def __init__(self, folder: Path, *facts: object) -> None:
        """``facts`` are what the proof depends on, in addition to this machine and its programs."""
        whole = json.dumps([_machine(), _programs(), *facts], default=str, sort_keys=True)
        self._path = folder / f"{hashlib.sha256(whole.encode()).hexdigest()}.json"

    def beside(self, folder: str) -> Path:
        """Return the path of another file in ``folder`` that depends on the same facts."""
        return self._path.parent.parent / folder / self._path.name

    def read(self) -> ProvenBatches | None:
        """Return the stored proof; None if there is none or it is damaged."""
        try:
            digest, body = self._path.read_bytes().split(b"\n", 1)
            if digest.decode() != hashlib.sha256(body).hexdigest():
                raise ValueError("wrong checksum")
            return ProvenBatches.decode(body)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            logger.warning("ignored the stored proof in %s: %s", self._path, error)
            return None

    def forget(self) -> None:
        """Remove the file, if there is one."""
        remove(self._path)

    def write(self, proven: ProvenBatches) -> None:
        """Store ``proven``. If the folder is not writable, only the next start takes longer."""
        body = proven.encode()
        checksum = hashlib.sha256(body).hexdigest().encode()
        keep(self._path, checksum + b"\n" + body, "the proof")


def code_digest(files: Iterable[Path]) -> str:
    """Return a digest of the content of ``files``."""
    whole = hashlib.sha256()
    for file in sorted(files):
        whole.update(hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


def _machine() -> list[object]:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:  # not Linux
        lines = []
    parts = [[word.strip() for word in line.partition(":")[::2]] for line in lines]
    known = [part for part in parts if part[0] in PROCESSOR]
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    device = _device() if on_gpu else str(mx.default_device())
    return [platform.platform(), platform.machine(), num_threads(), device, known]


def _device() -> dict[str, object]:
    """Return what is always the same of a GPU, and of others of its kind."""
    return {key: value for key, value in mx.device_info().items() if key not in CHANGING}


def _programs() -> list[object]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    own = Path(engine.__file__).parent.rglob("*.py")
    return [
        sys.version,
        versions,
        load_fast_blas(),
        os.environ.get(HOST_VARIABLE),
        code_digest(own),
    ]


def _plain(node: Node) -> Any:
    if isinstance(node, KVNode):
        return node.layer
    if isinstance(node, StateNode):
        return {"states": node.numbers}
    return [_plain(part) for part in node]


def _node(plain: Any) -> Node:
    if isinstance(plain, int):
        return KVNode(plain)
    if isinstance(plain, dict):
        return StateNode(tuple(plain["states"]))
    return tuple(_node(part) for part in plain)


def _of_json(wanted: type, value: Any) -> Any:
    """Return the array type whose MLX name is ``value``, such as mlx.core.float32."""
    if wanted is not mx.Dtype:
        raise NotImplementedError(wanted)
    found = getattr(mx, str(value).rpartition(".")[2], None)
    if not isinstance(found, mx.Dtype):
        raise ValueError(f"{value} is not an array type")
    return found
