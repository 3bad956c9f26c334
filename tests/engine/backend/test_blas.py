from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.backend.blas import BLAS_VARIABLE, physical_cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs another BLAS")

MEASURE = """
import json, logging, sys, time
lines = []
class Keep(logging.Handler):
    def emit(self, record): lines.append((record.levelname, record.getMessage()))
logging.basicConfig(level="INFO", handlers=[Keep()])
from engine.backend.blas import load_fast_blas
path = load_fast_blas()
again = load_fast_blas() if path else None
import mlx.core as mx
x, w = mx.random.normal((64, 576)), mx.random.normal((1536, 576))
mx.eval(x @ w.T)
times = []
for _ in range(5):
    start = time.perf_counter()
    mx.eval(x @ w.T)
    times.append(time.perf_counter() - start)
json.dump({"path": path, "again": again, "lines": lines, "seconds": min(times)}, sys.stdout)
"""


def measured(blas: str | None) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != BLAS_VARIABLE}
    if blas is not None:
        environment[BLAS_VARIABLE] = blas
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_fast_blas_computes_mlx_matmuls_and_is_logged_in_one_line() -> None:
    fast, slow = measured(None), measured("none")
    assert fast["path"]
    assert fast["again"] == fast["path"]
    assert [level for level, _ in fast["lines"]] == ["INFO"]
    assert str(fast["path"]) in str(fast["lines"])
    assert slow["path"] is None
    assert fast["seconds"] * 4 < slow["seconds"]


@pytest.mark.parametrize("library", ["/not/there.so", "libc.so.6"])
def test_a_library_that_does_not_help_is_a_warning(library: str) -> None:
    result = measured(library)
    assert result["path"] is None
    ((level, message),) = result["lines"]
    assert level == "WARNING"
    assert "no fast BLAS" in message
    assert library in message


def test_threads_are_limited_to_the_cores_of_the_process() -> None:
    assert 1 <= physical_cores() <= len(os.sched_getaffinity(0))


def test_none_is_loaded_where_mlx_computes_with_cuda(tmp_path: Path) -> None:
    (tmp_path / "mlx_cuda_13-0.31.0.dist-info").mkdir()
    code = "from engine.backend.blas import load_fast_blas; print(load_fast_blas())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((*sys.path, str(tmp_path)))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "None\n" and not done.stderr
