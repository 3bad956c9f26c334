"""Two ranks that compute as on a GPU: steps are dispatched ahead of their results.

``python -m tests.engine.parallel.forced_ranks MODEL KV_BITS`` starts both, and writes the tokens of
each request as JSON. Ranks of whole servers do not look ahead on a CPU."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import zmq

from engine.backend.blas import load_fast_blas
from services.ranks.group import GroupSockets, OtherRanks
from services.ranks.keepers import read_job
from shared.settings import Settings
from shared.supervisor_link import SupervisorLink

load_fast_blas(2)

from engine import device  # noqa: E402
from engine.backend.gpu_path import forced_gpu_path  # noqa: E402  # BLAS first
from engine.model.load import load  # noqa: E402
from engine.parallel.follower import follow  # noqa: E402
from engine.parallel.group import RankGroup  # noqa: E402
from engine.parallel.plans import PlanReceiver  # noqa: E402
from engine.parallel.progress import StepProgress  # noqa: E402
from engine.proving.choose import choose_executor  # noqa: E402
from engine.proving.remembered import AgreedRecord  # noqa: E402
from engine.replica.build import build_rank  # noqa: E402
from tests.engine.whole import Whole  # noqa: E402

MODULE = "tests.engine.parallel.forced_ranks"
PROMPTS = [[5] * 7, [9, 8, 7] * 21, list(range(40, 140)), [30, 31]]
MAX_TOKENS = 24
LATE_S = 1.0
"""How much later the other rank is ready to compute."""


def main(path: Path, kv_bits: int) -> None:
    settings: dict[str, Any] = {
        "kv_bits": kv_bits,
        "num_blocks": 4096,
        "distributed_mode": "ring",
        "num_local_ranks": 2,
        "prefill_chunk_tokens": 32,
    }
    with forced_gpu_path():
        if len(sys.argv) == 3:
            lead(path, settings)
        else:
            follow_plans(path, Settings(**settings))


def lead(path: Path, settings: dict[str, Any]) -> None:
    def on_failed(reason: str, code: int) -> None:
        sys.stderr.write(reason)
        os._exit(code)

    command = [sys.executable, "-m", MODULE, *sys.argv[1:], "other"]
    others = OtherRanks(Settings(**settings), zmq.Context(), on_failed, command)
    leader = others.join()
    times: list[float] = []

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            times.append(time.monotonic())
            return original(*args)

        return call

    with (
        patch.object(leader.plans, "start", noted(leader.plans.start)),
        patch("engine.replica.build.choose_executor", noted(choose_executor)),
    ):
        whole = Whole(path, leader=leader, **settings)
    assert whole.executor.spec.look_ahead
    for number, prompt in enumerate(PROMPTS):
        whole.submit(str(number), prompt, MAX_TOKENS)
        whole.turn()  # they join one after the other
    whole.run()
    found: dict[str, Any] = {"texts": dict(whole.texts)}
    found["again"] = whole.serve("again", PROMPTS[2], MAX_TOKENS)
    found["cached"] = whole.usage("again").cached_ram_tokens
    others.close()
    found["waited_s"] = times[1] - times[0]
    sys.stdout.write(json.dumps(found))


def follow_plans(path: Path, settings: Settings) -> None:
    """Follow rank 0 as a rank without a keeper."""
    job = read_job(0)
    assert job is not None
    os.environ |= job.environment | {"MLX_HOSTFILE": str(path / "hosts.json")}
    Path(os.environ["MLX_HOSTFILE"]).write_text(job.files["MLX_HOSTFILE"])
    sockets = GroupSockets.from_environment()
    assert sockets is not None
    SupervisorLink(socket.socket(fileno=0)).watch(lambda: os._exit(0))
    device.prepare()
    plans = PlanReceiver(zmq.Context(), sockets.plans, 1, 1 << 40)
    plans.wait_for_start()
    group = RankGroup.join()
    loaded = load(path, group=group.mlx)
    record = AgreedRecord.decode(plans.wait_for_start())
    time.sleep(LATE_S)  # as if it still loaded
    executor, _ = build_rank(loaded, settings, record, group)
    follow(executor, plans, StepProgress(), None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
