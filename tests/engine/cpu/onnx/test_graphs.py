"""Arguments that are bound once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.cpu.onnx.graphs import Graph, Shared


def test_onnx_runtime_keeps_no_identifier_for_its_makers_statistics(tmp_path: Path) -> None:
    """It would be created when the library is loaded, and sent with the names of models."""
    pytest.importorskip("onnxruntime")
    program = "import sys; from engine.cpu.onnx import graphs; sys.exit(graphs.unusable() or 0)"
    # Its makers leave out machines that test: no other variables.
    environment = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    root = Path(__file__).parents[4]
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=root, check=True)
    assert list(tmp_path.iterdir()) == []


def test_what_is_bound_is_read_and_written_in_every_call_by_all_that_share_it() -> None:
    graph = Graph()
    x, added = graph.input("x", "rows"), graph.input("added", "rows")
    graph.output(graph.node("Add", x, added), "rows")
    session = graph.session(threads=1)
    given, sums = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    argument, result = Shared(given[1:3]), Shared(sums[2:])
    calls = []
    for value in (10, 20):
        x_of = np.full(2, value, np.float32)
        call = session.bound()
        call.input(0, np.float32, x_of.shape, x_of.ctypes.data)
        call.shared_input(1, argument)
        call.shared_output(0, result)
        calls.append((call, x_of))
    for call, x_of in calls:
        given[1] += 5
        call()
        assert sums.tolist() == [0, 0, given[1] + x_of[0], given[2] + x_of[1]]


def test_an_array_that_would_be_copied_is_refused() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        Shared(np.zeros((2, 4), np.float32)[:, :2])
