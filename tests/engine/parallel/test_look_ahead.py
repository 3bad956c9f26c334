"""Two ranks that look ahead, as on GPUs: tokens of rank 0 reach the other one in the graph."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.ranks.test_ranks import at_length
from tests.engine.parallel.forced_ranks import LATE_S, MODULE, PROMPTS
from tests.oracle import Oracle

TIMEOUT_S = 300.0


@at_length
def test_ranks_that_look_ahead_give_mlx_lms_tokens(llama: Path) -> None:
    """In batches, beside chunks of others, and after a prefix in RAM."""
    command = [sys.executable, "-m", MODULE, str(llama), "16"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    oracle = Oracle(llama)
    for number, prompt in enumerate(PROMPTS):
        ours = found["texts"][str(number)]
        oracle.check_same(prompt, ours, oracle.greedy(prompt, len(ours)))
        assert len(ours) == 24
    assert found["again"] == found["texts"]["2"]
    assert found["cached"] >= 80
    assert found["waited_s"] > 0.9 * LATE_S, "a GPU would have waited for the other rank"
