"""Checks of Python, packages, and MLX's compute libraries."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement

from services.commands.doctor.report import Check, bad, good
from shared.paths import user_cache

_ALSO_SHOWN = ("mlx",)
_PIP = "reinstall mlx-lm-server, in its own virtual environment"


def checks() -> Iterator[Check]:
    yield Check("python", f"{platform.python_version()} on {platform.platform()}")
    yield from _packages()
    yield from _device()


def _packages() -> Iterator[Check]:
    """Compare the installed packages with the requirements of this version."""
    try:
        own = importlib.metadata.distribution("mlx-lm-server")
    except importlib.metadata.PackageNotFoundError:
        yield Check("packages", "mlx-lm-server runs from a source folder and is not installed")
        return
    wrong, shown = [], [f"mlx-lm-server {own.version}"]
    for line in own.requires or ():
        needed = Requirement(line)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        version = _version(needed.name)
        if version is None or not needed.specifier.contains(version, prereleases=True):
            wrong.append(
                f"{needed.name} {version or 'is not installed'} (required: {needed.specifier})"
            )
        elif needed.name == "mlx-lm":
            shown.append(f"mlx-lm {version}")
    shown += [f"{name} {_version(name)}" for name in _ALSO_SHOWN if _version(name)]
    if wrong:
        yield bad("packages", "; ".join(wrong), _PIP)
    else:
        yield good("packages", ", ".join(shown))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device() -> Iterator[Check]:
    from engine.backend.blas import load_fast_blas  # before anything imports mlx

    library = load_fast_blas()
    try:
        import mlx.core as mx

        total = float(mx.array([1.0, 2.0]).sum().item())
    except (
        Exception
    ) as error:  # a broken installation may raise anything, which is then the finding
        yield bad("device", f"mlx does not work: {error}", "install the extra 'cpu'")
        return
    if total != 3.0:
        yield bad("device", f"{mx.default_device()} computes 1 + 2 = {total}", _PIP)
        return
    yield good("device", str(mx.default_device()))
    if mx.default_device() == mx.gpu:
        yield _kernels()
    if mx.default_device() == mx.cpu and sys.platform == "linux":
        yield _blas(library)
        yield _onnx_runtime()


def _kernels() -> Check:
    from engine.batch.metal import kernel, records

    if reason := kernel.why_not():
        return Check("attention", f"gathers pages: {reason}")
    return Check("attention", records.summary(user_cache() / "kernels"))


def _blas(library: str | None) -> Check:
    if library is None:
        remedy = "install the extra 'cpu', or Debian's libopenblas0-pthread"
        return bad("fast BLAS", "not found: matrix products take up to 60 times as long", remedy)
    return good("fast BLAS", library)


def _onnx_runtime() -> Check:
    from engine import device

    if reason := device.host_unusable():
        text = f"not usable, quantized models are slow: {reason}"
        return bad("ONNX Runtime", text, "install the extra 'cpu'")
    return good("ONNX Runtime", _version("onnxruntime") or "found")
