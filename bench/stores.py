"""`python -m bench store-index`: the start of a kvstore whose directory has many blocks.

Prints the time from the start of the process to its first answer, how long answers take while it
builds its index, how long that takes, and the memory per block of the index."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import zmq

from shared import wire
from shared.hashing import HASH_BYTES

NAMESPACE = "0a" * HASH_BYTES
PATIENCE_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench store-index", description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as private:
        root = Path(private) / "blocks"
        empty_bytes, empty_line = _measure(Path(private) / "empty", Path(private), 0)
        _make_blocks(root, options.blocks)
        full_bytes, line = _measure(root, Path(private), options.blocks)
    print(empty_line)  # the time that any process takes
    print(line)
    print(f"memory: {(full_bytes - empty_bytes) / options.blocks:.0f} bytes a block")
    return 0


def _make_blocks(root: Path, count: int) -> None:
    """Create files with the names of blocks; an index does not read them."""
    for number in range(count):
        name = (number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128).to_bytes(16, "big").hex()
        folder = root / NAMESPACE / "rank_0" / name[:2]
        if number < 4096:
            folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(folder / f"{name}.safetensors", os.O_CREAT | os.O_WRONLY, 0o600))


def _measure(root: Path, private: Path, count: int) -> tuple[int, str]:
    """Return the resident memory of a kvstore on ``root`` once its index is complete, and a line
    about its start."""
    endpoint = f"ipc://{private}/kvstore"
    command = [sys.executable, "-m", "services.processes.kvstore", "--ssd-max-size-gb", "0"]
    command += ["--ssd-cache-dir", str(root), "--kvstore-socket", endpoint, "--log-level", "error"]
    command += ["--disk-reserve-gb", "0"]
    started = time.monotonic()
    process = subprocess.Popen(command)
    with zmq.Context() as context, context.socket(zmq.DEALER) as kvstore:
        kvstore.linger = 0
        kvstore.rcvtimeo = round(1000 * PATIENCE_S)
        kvstore.connect(endpoint)
        _has_none(kvstore)
        first_s, slowest_s = time.monotonic() - started, 0.0
        while _stats(kvstore).indexing:
            asked = time.monotonic()
            _has_none(kvstore)
            slowest_s = max(slowest_s, time.monotonic() - asked)
            time.sleep(0.02)
        indexed_s = time.monotonic() - started
        listing = ["ps", "-o", "rss=", "-p", str(process.pid)]
        resident = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    process.terminate()
    process.wait(60)
    line = (
        f"{count} blocks: first answer after {first_s:.2f} s, all indexed after {indexed_s:.1f} s; "
    )
    return 1024 * int(resident), line + f"meanwhile the slowest answer took {slowest_s:.3f} s"


def _has_none(kvstore: zmq.Socket[bytes]) -> None:
    hashes = [bytes(HASH_BYTES)]
    kvstore.send_multipart(wire.encode(wire.Has(ticket=1, namespace=NAMESPACE, hashes=hashes)))
    wire.decode(kvstore.recv_multipart(), wire.FromStore)


def _stats(kvstore: zmq.Socket[bytes]) -> wire.StoreStats:
    kvstore.send_multipart(wire.encode(wire.StoreStatsWanted()))
    reply, _ = wire.decode(kvstore.recv_multipart(), wire.FromStore)
    stats: wire.StoreStats = reply.stats
    return stats


if __name__ == "__main__":
    sys.exit(main())
