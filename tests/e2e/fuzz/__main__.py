"""Random requests generated from `/openapi.json`: `python -m tests.e2e.fuzz --requests 10000`.

Starts a whole server with tiny models and an API key. schemathesis generates valid and invalid
requests from the server's own description, and checks every answer against that description. A
tenth as many requests are those of coding agents (`tests.e2e.fuzz.agents`), and on a tenth as many
connections bodies are framed in random ways (`tests.e2e.fuzz.framing`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.fuzz.agents import fuzz_agents
from tests.e2e.fuzz.framing import fuzz_framing
from tests.e2e.server import Server, serving
from tests.text_models import make_text_model
from tests.tiny_models import make_inserting

KEY = "fuzz-key"
FLAGS = (
    *("--default-max-tokens", "4", "--max-generation-tokens", "16"),
    *("--max-prompt-tokens", "1000"),
    *("--api-key", KEY, "--no-ssd"),
)
MIN_RUN_REQUESTS = 100
"""A run of schemathesis with fewer requests has failed to start."""
EXCLUDED_CHECKS = (
    # A schema cannot express limits of the model, or which fields may be combined.
    "positive_data_acceptance",
)


def models_file(directory: Path) -> Path:
    """Write tiny models that generate, embed and rank, and return the file that names them. A
    request that names none goes to the one that it is for."""
    paths = {
        "model": make_inserting(directory / "model"),
        "embedder": make_text_model("bert", directory / "embedder"),
        "ranker": make_text_model("xlm_roberta_reranker", directory / "ranker"),
    }
    config = directory / "models.toml"
    tables = [f'[[model]]\nid = "{name}"\npath = "{path}"\n' for name, path in paths.items()]
    config.write_text("".join(tables))
    return config


def fuzz(server: Server, *options: str) -> subprocess.CompletedProcess[str]:
    """Run schemathesis once; its exit code is 0 if no answer was wrong."""
    command = [
        *(str(Path(sys.executable).with_name("st")), "--no-color", "run"),
        f"{server.url}/openapi.json",
        *("--header", f"Authorization: Bearer {KEY}"),
        *("--exclude-path", "/page/feed"),  # which has no end
        *("--exclude-checks", ",".join(EXCLUDED_CHECKS), "--suppress-health-check", "all"),
        *("--output-sanitize", "false", "--continue-on-failure", "--warnings", "off"),
        *options,
    ]
    with tempfile.TemporaryDirectory() as scratch:  # schemathesis writes files to its cwd
        return subprocess.run(command, cwd=scratch, capture_output=True, text=True)


def requests_answered(server: Server) -> int:
    return int(server.metric("mlx_lm_server_requests_total"))


def internal_errors(server: Server) -> list[str]:
    """Return the log lines about internal errors of the router."""
    return [line for line in server.log if " failed (req_" in line or "Traceback" in line]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.fuzz", description=__doc__)
    parser.add_argument(
        "--requests",
        type=int,
        default=10_000,
        help="least number of requests; each seed has 14,000 or more, however few are wanted"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the first run (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    seed, answered, failed = options.seed, 0, False
    with tempfile.TemporaryDirectory() as directory:
        config = ("--config", str(models_file(Path(directory))))
        with serving(None, *config, *FLAGS, _MLX_LM_SERVER_CHECK_INTEGRITY="1") as server:
            while answered < options.requests:
                result = fuzz(server, "--seed", str(seed), "--max-examples", "100")
                sys.stdout.write(result.stdout + result.stderr)
                failed |= result.returncode != 0
                seed += 1
                before, answered = answered, requests_answered(server)
                if answered - before < MIN_RUN_REQUESTS:
                    break
            reached, wrong = fuzz_agents(server.client, options.requests // 10, options.seed)
            sys.stdout.write("\n".join([*wrong, f"agents' fields: {dict(reached)}", ""]))
            failed |= bool(wrong)
            framed, misread = fuzz_framing(server.port, KEY, options.requests // 10, options.seed)
            sys.stdout.write("\n".join([*misread, f"framing: {dict(framed)}", ""]))
            failed |= bool(misread)
            errors = internal_errors(server)
            sys.stdout.write("\n".join([*errors, ""]))
            sys.stdout.write(f"{answered} requests, {len(errors)} internal errors\n")
            return int(failed or bool(errors) or answered < options.requests)


if __name__ == "__main__":
    sys.exit(main())
