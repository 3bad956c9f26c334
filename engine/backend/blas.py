"""A fast BLAS for MLX on Linux CPUs.

The Linux CPU wheel of MLX contains a reference BLAS, whose float32 matmul of 64 rows is about 57
times slower than OpenBLAS. A library loaded with ``RTLD_GLOBAL`` before ``mlx.core`` replaces it,
because the dynamic linker looks there first.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

BLAS_VARIABLE = "MLX_LM_SERVER_BLAS"
"""Environment variable: path of the library to load, or ``none``."""

_loaded: str | None = None


def load_fast_blas(processes: int = 1) -> str | None:
    """Load the best BLAS available before anything imports ``mlx.core``. Return its path.

    The cores are divided among ``processes`` that compute together. One log line names the library,
    or warns that there is none (None). On macOS and with a CUDA build of MLX nothing is loaded or
    logged, because the system has a BLAS or the device computes. A second call does nothing.
    """
    global _loaded
    if _loaded or sys.platform != "linux" or _mlx_uses_cuda():
        return _loaded
    if "mlx.core" in sys.modules:
        logger.warning("no fast BLAS: mlx was imported before it could be loaded")
        return None
    threads = max(1, physical_cores() // processes)
    # Read once, when the library starts. One thread per hyper-thread is slower.
    for variable in ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, str(threads))
    # Milliseconds that MKL's threads spin while they wait for work. The default of 200 takes CPU
    # time from the router. 1 uses less CPU time per step and is as fast, 0 is 8 % slower.
    os.environ.setdefault("KMP_BLOCKTIME", "1")
    _prepare_openblas()
    failures: list[str] = []
    for path in _candidates():
        try:
            library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        except OSError as error:
            failures.append(str(error))
            continue
        if _is_bound_globally(library):
            _loaded = str(path)
            logger.info("fast BLAS: %s, %d threads", path, threads)
            return _loaded
        failures.append(f"{path} does not provide cblas_sgemm")
    logger.warning(
        "no fast BLAS, matmuls will be very slow: install %s, or set %s to a library (%s)",
        "the mkl package" if platform.machine() == "x86_64" else "libopenblas0-pthread",
        BLAS_VARIABLE,
        "; ".join(failures) or "none found",
    )
    return None


def _prepare_openblas() -> None:
    """Configure the OpenBLAS of NumPy's wheels, which starts when NumPy is imported."""
    # Exponent of two, in clock ticks. Like KMP_BLOCKTIME for MKL: 0.3 ms instead of 20.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")
    # OpenBLAS treats AMD processors that it does not know as if they had no AVX-512.
    if "AuthenticAMD" in (known := _cpu_info()) and "avx512vl" in known:
        os.environ.setdefault("OPENBLAS_CORETYPE", "SkylakeX")


def _cpu_info() -> set[str]:
    """Return the words in Linux's description of the first processor."""
    try:
        return set(Path("/proc/cpuinfo").read_text().split("\n\n")[0].split())
    except OSError:
        return set()


def physical_cores() -> int:
    """Return the cores of this process within a container's quota; hyper-threads count once."""
    cores = set()
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    for cpu in cpus:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    return max(1, min(len(cores) or os.cpu_count() or 1, _cpu_quota()))


def _cpu_quota() -> int:
    """Return the CPU limit of this control group in whole cores."""
    try:
        allowed, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, -(-int(allowed) // int(period)))
    except (OSError, ValueError):  # no control groups, version 1, or "max"
        return sys.maxsize


def _mlx_uses_cuda() -> bool:
    # File names: reading each package's metadata takes a tenth of a second.
    return any(any(Path(entry).glob("mlx_cuda*-info")) for entry in sys.path)


def _candidates() -> Iterator[Path]:
    override = os.environ.get(BLAS_VARIABLE)
    if override:
        if override != "none":
            yield Path(override)
        return
    # The mkl wheel puts its libraries into the environment's data folder.
    for folder in dict.fromkeys((sysconfig.get_path("data"), sys.prefix)):
        yield from sorted(Path(folder, "lib").glob("libmkl_rt.so*"))
    libraries = Path("/usr/lib", f"{platform.machine()}-linux-gnu")
    for variant in ("openblas-pthread", "openblas-openmp"):
        yield from sorted((libraries / variant).glob("libopenblas.so.0"))
    yield from sorted(libraries.glob("libopenblas.so.0"))
    for folder in ("/usr/lib64", "/usr/lib"):
        yield from sorted(Path(folder).glob("libopenblas*.so.0"))


def _is_bound_globally(library: ctypes.CDLL) -> bool:
    """Return whether ``cblas_sgemm`` resolves to this library, looked up as libmlx does."""
    process = ctypes.CDLL(None)
    try:
        theirs = ctypes.cast(process.cblas_sgemm, ctypes.c_void_p).value
        ours = ctypes.cast(library.cblas_sgemm, ctypes.c_void_p).value
    except AttributeError:
        return False
    return theirs == ours
