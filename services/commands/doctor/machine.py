"""Checks of the machine: memory, processors, file descriptors, and the server's folders."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import zmq

from services.commands.doctor.report import Check, bad, good, warning
from services.supervision.fleet.memory import engines_bytes
from shared.locks import try_lock
from shared.machine_memory import CGROUP, machine_bytes, usable_bytes
from shared.rundir import RunDir, RunDirError, ends_with_login
from shared.settings import Settings

DESCRIPTORS = 4096
"""Each connection and each open block file takes one. mlx-lm sets the limit to this value when it
is imported, which fails if less is allowed."""
_GB = 1e9


def checks(options: Settings | None) -> Iterator[Check]:
    """Without ``options``, only checks that concern every server."""
    yield _memory()
    yield cpu_limit(CGROUP)
    yield _descriptors()
    yield _run_folder()
    yield from _model_cache()
    if options is not None and not options.no_ssd:
        yield from _ssd_cache(options)
    if options is not None and options.response_store_dir is not None:
        yield _folder("responses", options.response_store_dir, "--response-store-dir")


def _memory() -> Check:
    total = machine_bytes()
    text = f"{total / _GB:.1f} GB"
    if usable_bytes() < total:
        text += f", of which this container may use {usable_bytes() / _GB:.1f} GB"
    elif engines_bytes() < total:
        text += f", of which Metal recommends about {engines_bytes() / _GB:.1f} GB for models"
    return Check("memory", text)


def cpu_limit(cgroup: Path) -> Check:
    """Compare the limit of the control group at ``cgroup`` with the number of visible
    processors."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    allowed = _allowed_cpus(cgroup)
    if allowed is None or allowed >= (cores or 1):
        return good("processors", f"{cores}")
    return warning(
        "processors",
        f"{cores} are visible, but this control group may use {allowed:g} of them: more threads "
        "are throttled in the middle of a step",
        "raise the limit (docker --cpus, limits.cpu), or pin the container to that many "
        "processors (docker --cpuset-cpus)",
    )


def _allowed_cpus(cgroup: Path) -> float | None:
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _descriptors() -> Check:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= DESCRIPTORS:
        return good("descriptors", "unlimited" if hard == resource.RLIM_INFINITY else str(hard))
    return bad(
        "descriptors",
        f"limit of {hard} per process: mlx-lm cannot be imported, and connections would be refused",
        f"raise the hard limit to at least {DESCRIPTORS}: LimitNOFILE= in systemd, docker "
        f"--ulimit nofile={DESCRIPTORS}, /etc/security/limits.conf",
    )


def _run_folder() -> Check:
    """Create what a server creates: its private folder, with a socket in it."""
    try:
        with RunDir.create() as run_dir, zmq.Context() as context:
            with context.socket(zmq.ROUTER) as probe:
                probe.bind(run_dir.socket("doctor"))
            parent = run_dir.path.parent
    except (RunDirError, zmq.ZMQError) as error:
        return bad(
            "run folder",
            str(error),
            "set XDG_RUNTIME_DIR to a writable folder on a local disk whose path is shorter than "
            "60 bytes; in a container with a read-only root, mount one (docker --tmpfs /tmp)",
        )
    wanted = os.environ.get("XDG_RUNTIME_DIR")
    if wanted and Path(wanted) != parent and not ends_with_login(wanted):
        remedy = "correct or unset XDG_RUNTIME_DIR; its path must be short"
        return warning("run folder", f"{wanted} is not usable, {parent} is used instead", remedy)
    return good("run folder", f"sockets are created in {parent}")


def _model_cache() -> Iterator[Check]:
    from huggingface_hub.constants import HF_HUB_CACHE

    yield _folder("model cache", Path(HF_HUB_CACHE), "HF_HOME")


def _ssd_cache(options: Settings) -> Iterator[Check]:
    root = options.ssd_cache_dir.expanduser()
    found = _folder("SSD cache", root, "--ssd-cache-dir")
    yield found
    if found.verdict == "BAD":
        return
    if "ssd_cache_dir" in options.given and _is_owned(root):  # otherwise the one next to it is used
        remedy = "stop that server, or set another --ssd-cache-dir, or --no-ssd"
        yield bad("SSD cache", f"a running server uses {root}", remedy)
    free = shutil.disk_usage(_existing(root)).free
    if free < options.disk_reserve_gb * 1e9:
        yield bad(
            "SSD cache",
            f"no blocks will be written: {free / _GB:.1f} GB are free, and --disk-reserve-gb "
            f"reserves {options.disk_reserve_gb:g} GB",
            "free some space, use a folder on another disk (--ssd-cache-dir), lower "
            "--disk-reserve-gb, or disable the SSD tier (--no-ssd)",
        )


def _is_owned(root: Path) -> bool:
    """Return whether a running kvstore holds the lock of its folder."""
    try:
        lock = try_lock(root / "lock", create=False)
    except OSError:
        return False
    if lock is None:
        return True
    os.close(lock)
    return False


def _folder(name: str, path: Path, flag: str) -> Check:
    """Check whether ``path`` is writable or can be created. It is not created."""
    path = path.expanduser()
    existing = _existing(path)
    if not existing.is_dir():
        return bad(name, f"{path}: {existing} is not a folder", f"set {flag} to another path")
    try:
        with tempfile.TemporaryFile(dir=existing, buffering=0) as probe:
            probe.write(b"doctor")
    except OSError as error:
        text = f"{path}: {existing} is not writable ({error.strerror})"
        remedy = f"give this user access, or free some space there, or set {flag} to another folder"
        return bad(name, text, remedy)
    free = shutil.disk_usage(existing).free
    return good(name, f"{path} ({free / _GB:.1f} GB free)")


def _existing(path: Path) -> Path:
    """Return the first of ``path`` and its parent folders that exists."""
    for each in (path, *path.parents):
        try:
            if each.exists():
                return each
        except OSError:  # a file is in the place of a folder, or access is denied
            continue
    return Path("/")
