"""`python -m bench [NAME ...]`: run the comparisons and print a table for each."""

from __future__ import annotations

import argparse
import importlib
import runpy
import signal
import sys

from engine.backend.blas import load_fast_blas

load_fast_blas()  # before anything imports mlx

COMPARISONS = {
    "cpu": "engine.cpu",
    "ragged": "engine.cpu",
    "decode": "engine.decode",
    "precision": "engine.precision",
    "same-bits": "engine.same_bits",
    "parted-texts": "engine.parted_texts",
    "adapters": "engine.adapters",
    "kernels": "engine.kernels",
    "metal": "engine.metal",
    "scheduling": "engine.scheduling",
    "kv-bits": "engine.kv_bits",
    "embeddings": "engine.embeddings",
    "router": "router.alone",
    "replies": "router.replies",
    "agents": "serving.agents",
    "agents-in-budget": "serving.agents",
    "joined": "serving.crowds",
    "crowded": "serving.crowds",
    "batches": "serving.batches",
    "growth": "serving.growth",
    "decisions": "serving.decisions",
    "profile": "serving.host_time",
    "restart": "serving.restart",
    "prompts": "prompt_times.parts",
    "llama-cpp": "peers.llama_cpp",
    "images": "peers.images",
    "ranks": "ranks",
    "ranks-restart": "ranks",
}
"""Name -> module of `bench`, whose function of that name takes ``model`` and ``runs``."""
WITH_MLX_LM = ("throughput", "prefix", "join", "ssd", "connects", "stack")
"""Names in `bench.peers.mlx_lm`, which share one pair of servers."""
WITH_FLAGS = {
    "grammars": "engine.grammars",
    "sampling": "engine.sampling",
    "step": "engine.step",
    "same-text": "serving.same_text",
    "speculation": "speculation.drafts",
    "every-kind": "speculation.every_kind",
    "lossless": "speculation.lossless",
}
"""Name -> module of `bench`, a program with its own flags (``NAME --help``)."""
DEFAULT = ("cpu", "ragged", "scheduling", "kv-bits", "kernels", "router", *WITH_MLX_LM)
"""The others need a Mac, another program, an hour, Linux, an extra, or py-spy, or have no
baseline."""


def main() -> int:
    if sys.argv[1:2] and sys.argv[1] in WITH_FLAGS:
        module = f"bench.{WITH_FLAGS[sys.argv.pop(1)]}"
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        epilog=f"With flags of their own (NAME --help): {', '.join(WITH_FLAGS)}.",
    )
    names = [*COMPARISONS, *WITH_MLX_LM]
    parser.add_argument(
        "names", nargs="*", choices=[[], *names], help=f"default: {', '.join(DEFAULT)}"
    )
    parser.add_argument("--runs", type=int, default=5, help="alternating runs (default: 5)")
    parser.add_argument("--model", default="demo-fp32")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are stopped too
    chosen = options.names or DEFAULT
    for name in chosen:
        if name in COMPARISONS:
            print(f"\n## {name}", flush=True)
            found = importlib.import_module(f"bench.{COMPARISONS[name]}")
            getattr(found, name.replace("-", "_"))(options.model, options.runs)
    if beside := [name for name in chosen if name in WITH_MLX_LM]:
        importlib.import_module("bench.peers.mlx_lm").compare(beside, options.model, options.runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
