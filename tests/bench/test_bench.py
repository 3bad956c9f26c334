"""The comparisons that need no servers, on a tiny model."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from bench.engine import step
from bench.primitives import count_primitives, fused_functions
from bench.router import alone as router
from bench.serving import host_time
from bench.side import SIDES, side


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model("llama"))


@pytest.mark.parametrize("name", SIDES)
def test_a_side_answers_each_call_with_seconds(name: str, model: str) -> None:
    with side(name, model) as one:
        assert one.call("prefill", 32, 16) > 0
        assert one.call("decode", [20, 20], 2) > 0
        assert one.call("generate", [40, 7], 2) > 0
        if name == "ours":
            assert one.call("read") > 0


def test_the_same_steps_are_measured_with_the_same_bits_and_without(model: str) -> None:
    with side("ours", model, module="bench.engine.same_bits") as one:
        for call in (("steps", 2, 20, 2), ("chunks", 16, 16, 2)):
            assert one.call(*call) > 0
            assert one.call("shortest", True) > 0 and one.call("shortest", False) > 0


def test_steps_of_the_executor_alone(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--rows", "1,2", "--context", "20,9000", "--chunks", "16", "--after", "0,32"]
    flags += ["--steps", "2", "--runs", "1", "--json", "--model", str(tiny_model("llama"))]
    assert step.measure(flags) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["rows"], each["context"]) for each in found["decode"]] == [(1, 20), (2, 20)]
    assert [(each["tokens"], each["start"]) for each in found["prefill"]] == [(16, 0), (16, 32)]
    assert all(each["seconds"] > 0 for each in [*found["decode"], *found["prefill"]])


def test_primitives_are_counted_without_views_and_without_what_was_evaluated() -> None:
    a, b = mx.zeros((4, 4)), mx.ones((4, 4)) * 2
    mx.eval(a, b)
    c = (a @ b).T[:2].reshape(4, 2) @ b[:2] + a
    assert count_primitives([c]) == {"Matmul": 2, "Add": 1}
    mx.eval(c)
    assert count_primitives([c, a]) == {}
    joined = mx.concatenate([a, b, a + 1])
    assert count_primitives([joined]) == {"Add": 1, "Concatenate": 3}


def test_one_primitive_stands_for_each_fused_function() -> None:
    x, weight = mx.zeros((1, 4, 3, 8)), mx.ones(8)
    offsets = mx.array([5])
    mx.eval(x, weight, offsets)
    with fused_functions():
        normed = mx.fast.rms_norm(x, weight, 1e-5)
        turned = mx.fast.rope(normed, 8, traditional=False, base=1e4, scale=1.0, offset=offsets)
        mask = mx.array([True, True, False])
        out = mx.fast.scaled_dot_product_attention(
            turned, x[:, :2] + 1, x[:, :2, :, :4], scale=1.0, mask=mask
        )
    assert out.shape == (1, 4, 3, 4)
    assert count_primitives([out]).total() == 4
    normed = mx.fast.rms_norm(x, weight, 1e-5)
    assert count_primitives([normed]).total() > 1 or mx.default_device() == mx.gpu


_COUNTS = """
import sys
import mlx_lm
from bench.engine import kernels
from engine.batch import ragged
from engine.cache.layout import probe_layout

ragged.install()
model = mlx_lm.load(sys.argv[1])[0]
layout = probe_layout(model)
for lengths, width in (([40] * 8, 1), ([40, 9] * 4, 1), ([40] * 8, 16), ([40, 9] * 4, 16)):
    steps = [kernels.theirs(model, layout, lengths, width)]
    steps += [kernels.ours(model, layout, lengths, width, *way) for way in kernels.WAYS]
    print(*(cost.per_layer for cost in kernels.measure(steps, 2, 1)))
"""


def test_a_step_of_ours_is_counted_beside_that_of_mlx_lm(model: str) -> None:
    """In a process of its own: other tests put operations for CPUs in the place of mlx-lm's."""
    command = [sys.executable, "-c", _COUNTS, model]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    steps = [map(float, line.split()) for line in ended.stdout.splitlines()]
    assert len(steps) == 4  # decodes and chunks of 8 rows, even and uneven
    for number, (theirs, ours, quantized, gathering) in enumerate(steps):
        # Norms and projections, rope, writes, attention, the gate: 17 a layer and the rest.
        assert 17 < theirs < 24
        if number != 3:  # uneven chunks are gathered in groups
            assert 17 < quantized <= 1.05 * theirs and 17 < ours <= 1.15 * theirs
        assert quantized < gathering < 3 * theirs


def test_the_router_is_measured_beside_a_bare_application(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load = router.Load(streams=12, engines=3, models=2, rate=100, seconds=1, settle_s=0.1)
    ((ours, bare),) = router.measure(Path(model), load, runs=1)
    # Both have sent tokens at some rate, and it has cost something: no more, beside other tests.
    for one in (ours, bare):
        assert one.tokens > 0 and one.cpu_s > 0 and one.memory_mb > 10
    assert "times the bare application's" in capsys.readouterr().out


_MEASURES = """
import sys, time
from bench.servers import running
command = [sys.executable, "-m", "bench.router.bare", sys.argv[1]]
with running(command, "/readyz") as (port, _):
    print(port, flush=True)
    time.sleep(600)
"""


def test_a_measurement_that_is_killed_leaves_no_server_behind(tmp_path: Path) -> None:
    events = tmp_path / "events.json"
    events.write_text("[]")
    command = [sys.executable, "-c", _MEASURES, str(events)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as measuring:
        assert measuring.stdout is not None
        address = ("127.0.0.1", int(measuring.stdout.readline()))
        socket.create_connection(address).close()
        measuring.kill()
    deadline = time.monotonic() + 60
    with pytest.raises(ConnectionRefusedError):
        while time.monotonic() < deadline:
            socket.create_connection(address).close()
            time.sleep(0.05)


_SHORT_PAGE = """
import sys
from bench.__main__ import main
from bench.engine import metal
metal.DECODE_STEPS, metal.PREFILLS = 4, ((1, 300), (8, 40))
metal.MEMORY_TOKENS, metal.GRAPH_LENGTHS = 300, (300,) * 8
sys.exit(main())
"""


@pytest.mark.slow
def test_the_page_about_a_gpu_is_right_on_a_cpu_that_computes_as_one(model: str) -> None:
    command = [sys.executable, "-c", _SHORT_PAGE, "metal", "--runs=1", f"--model={model}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "look-ahead: True" in done.stdout
    assert done.stdout.endswith("**All is right.**\n")
    speeds = [line.split("|")[-2] for line in done.stdout.splitlines() if " tokens |" in line]
    assert len(speeds) == 26 and all(float(ratio) > 0 for ratio in speeds)


def test_a_wrong_engine_is_found(model: str) -> None:
    broken = """
import sys
from engine.backend.blas import load_fast_blas
load_fast_blas()
import mlx.core as mx
from bench.engine.metal import metal
from engine.batch.gpu import GPUBatch
from engine.proving import choose
choose.prove = lambda *_: None  # which would keep such batches from being used
write = GPUBatch.write
GPUBatch.write = lambda batch, layer, *new: write(batch, layer, *(mx.roll(a, 1, 0) for a in new))
metal(sys.argv[1], 1)
"""
    command = [sys.executable, "-c", broken, model]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "**WRONG: logits differ by " in done.stdout
    assert "texts differ where the next token is clear" in done.stdout


def test_samples_are_those_of_the_innermost_function_of_this_repository() -> None:
    root = host_time.ROOT
    entry = f"{root}/services/processes/engine.py"
    stacks = host_time.read_stacks(
        f"run ({entry}:1);step ({root}/engine/step.py:9);eval (/usr/mlx.py:2) 3\n"
        f"run ({entry}:1);step ({root}/engine/step.py:12) 2\n"
        f"run ({entry}:1);get ({root}/.venv/lib/site-packages/a.py:1) 4\n"
        "<module> (threading.py:1) 1\n"
    )
    assert host_time.shares(stacks) == {
        "engine/step.py: step": {"eval of mlx.py:2": 3, "step of step.py:12": 2},
        "services/processes/engine.py: run": {"get of a.py:1": 4},
        "elsewhere": {"<module> of threading.py:1": 1},
    }
