"""The other servers: how each is installed, into its own folder, and started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.backend.blas import load_fast_blas
from engine.backend.threads import num_threads
from shared.paths import user_cache

LLAMA_VARIABLE = "LLAMA_SERVER"
"""Environment variable: path of llama.cpp's llama-server, if it is already installed."""
LLAMA_SLOTS, LLAMA_SLOT_TOKENS = 16, 4096
_DONE, _FAILED = "installed.txt", "failed.txt"
_ERROR_LINES = 3
_INSTALL_S = 3600
_CMAKE = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_UI=OFF"),
    *("-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF"),
)


class PeerUnavailable(Exception):
    """It cannot be installed here, or does not run; the message is the end of the error."""


class Peer(NamedTuple):
    name: str
    packages: tuple[str, ...]
    command: Callable[[Path, Path], list[str]]
    """The command for an installation folder and weights. A port is appended."""
    reads: str = "demo-fp32"
    """The model that this server runs in the comparison: the same weights."""
    probe: str = "/v1/models"
    model: str = ""
    """The model's name in requests; empty for the first one that the server lists."""
    install: Callable[[Path], None] | None = None
    """Installs it, instead of its ``packages``."""
    flags: tuple[str, ...] = ()
    """Flags for this server, so that it computes in the same way."""


def folder_of(peer: Peer) -> Path:
    return user_cache() / "peers" / peer.name


def install(peer: Peer) -> Path:
    """Return the folder of ``peer``, which is installed if it is missing.

    Raises `PeerUnavailable`, also if a reason is stored (`keep_reason`)."""
    folder = folder_of(peer)
    if reason := kept_reason(peer):
        raise PeerUnavailable(reason)
    if not (folder / _DONE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"installing {peer.name} into {folder}", flush=True)
        (peer.install or (lambda at: _install_packages(at, peer.packages)))(folder)
        (folder / _DONE).write_text(version(peer, folder))
    return folder


def keep_reason(peer: Peer, reason: PeerUnavailable) -> None:
    """Store the reason why ``peer`` does not run: attempts that take minutes are not repeated at
    each call."""
    folder_of(peer).mkdir(parents=True, exist_ok=True)
    (folder_of(peer) / _FAILED).write_text(str(reason))


def kept_reason(peer: Peer) -> str:
    """Return the stored reason why ``peer`` did not run, if any."""
    file = folder_of(peer) / _FAILED
    return file.read_text() if file.exists() else ""


def forget_reason(peer: Peer) -> None:
    (folder_of(peer) / _FAILED).unlink(missing_ok=True)


def version(peer: Peer, folder: Path) -> str:
    """Return the installed versions."""
    if not peer.packages:
        return (
            "llama.cpp of llama-cpp-python" if not os.environ.get(LLAMA_VARIABLE) else "llama.cpp"
        )
    listed = subprocess.run(
        [folder / "bin" / "pip", "list", "--format=freeze"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    found = dict(line.split("==", 1) for line in listed if "==" in line)
    names = [peer.packages[0].partition("=")[0], "mlx-lm", "mlx"]
    return ", ".join(f"{name} {found[name]}" for name in dict.fromkeys(names) if name in found)


def environment(peer: Peer, home: Path) -> Mapping[str, str]:
    """Return the variables of its process: MLX gets the same BLAS as in this server. In an empty
    ``home`` it finds no stored prefixes (rapid-mlx stores them)."""
    blas = load_fast_blas()
    fast = {"LD_PRELOAD": blas} if blas and peer.packages else {}
    own = {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
    return {**os.environ, **fast, **own, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}


def _install_packages(folder: Path, packages: tuple[str, ...]) -> None:
    _run([sys.executable, "-m", "venv", folder])
    if sys.platform == "linux":
        packages += ("mlx[cpu]",)
    python, quietly = str(folder / "bin" / "python"), ("install", "--quiet")
    pip = [python, "-m", "pip", *quietly, "--no-compile"]
    _run([*pip, "--upgrade", "pip", "uv"])
    uv = [str(folder / "bin" / "uv"), "pip", *quietly, "--python", python]
    try:
        _run([*uv, *packages])  # in a tenth of the time, and large files exist once
    except PeerUnavailable:
        _run([*pip, *packages])  # which may be configured to look elsewhere


def _install_llama(folder: Path) -> None:
    if os.environ.get(LLAMA_VARIABLE):
        return
    build, sources = folder / "build", folder / "sources"
    shutil.rmtree(sources, ignore_errors=True)
    _run([sys.executable, "-m", "venv", folder])
    _run([folder / "bin" / "pip", "install", "--quiet", "cmake"])
    pip: list[str | Path] = [
        folder / "bin" / "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        sources,
    ]
    _run([*pip, "--no-binary", "llama-cpp-python", "llama-cpp-python"])
    (archive,) = sources.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(sources, filter="data")
    (root,) = sources.glob("*/vendor/llama.cpp")
    _run([folder / "bin" / "cmake", "-S", root, "-B", build, *_CMAKE])
    parallel = ["--parallel", str(num_threads())]
    _run([folder / "bin" / "cmake", "--build", build, "--target", "llama-server", *parallel])


def _run(command: Sequence[str | Path]) -> None:
    """Raises `PeerUnavailable`."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_INSTALL_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailable(str(error)) from None
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise PeerUnavailable("; ".join(said[-_ERROR_LINES:]))


def _llama(folder: Path, weights: Path) -> list[str]:
    built = folder / "build" / "bin" / "llama-server"
    program = os.environ.get(LLAMA_VARIABLE) or str(built)
    command = [program, "--model", str(weights), "--host", "127.0.0.1", "--no-webui"]
    command += ["--parallel", str(LLAMA_SLOTS)]
    command += ["--ctx-size", str(LLAMA_SLOTS * LLAMA_SLOT_TOKENS)]
    threads = str(num_threads())
    return [*command, "--threads", threads, "--threads-batch", threads]


PEERS = (
    Peer(
        "mlx_lm.server",
        ("mlx-lm",),
        lambda folder, weights: [
            *(str(folder / "bin" / "python"), "-m", "mlx_lm", "server"),
            *("--model", str(weights), "--log-level", "ERROR"),
        ],
        model="default_model",  # it lists all models in the hub's cache
    ),
    Peer(
        "vllm-mlx",
        ("vllm-mlx",),
        lambda folder, weights: [
            *(str(folder / "bin" / "vllm-mlx"), "serve", str(weights)),
            *("--host", "127.0.0.1", "--continuous-batching"),
        ],
    ),
    Peer(
        "rapid-mlx",
        ("rapid-mlx",),
        lambda folder, weights: [
            *(str(folder / "bin" / "rapid-mlx"), "serve", str(weights), "--host", "127.0.0.1"),
        ],
    ),
    Peer(
        "mlx-openai-server",
        ("mlx-openai-server",),
        lambda folder, weights: [
            *(str(folder / "bin" / "mlx-openai-server"), "launch", "--model-type", "lm"),
            *("--model-path", str(weights), "--host", "127.0.0.1", "--no-log-file"),
        ],
    ),
    Peer(
        "llama.cpp",
        (),
        _llama,
        reads="demo-4bit",
        probe="/health",
        install=_install_llama,
        flags=("--cpu-precision", "fast"),
    ),
)
"""Each with its default flags, except that batching is enabled."""
