"""A start in a terminal, as a newcomer sees it, and what a model takes of memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest

from tests.e2e.process import ROOT

PATIENCE_S = 120


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_a_start_says_what_it_does_and_ends_with_a_curl_that_works(
    tiny_model: Callable[..., Path], tmp_path: Path, socket_dir: Path
) -> None:
    model = tiny_model("llama")
    flags = [f"--model={model}", "--memory-gb=1.2", "--max-batch-size=4"]
    outside = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")
    }
    own = {"XDG_CACHE_HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(socket_dir)}
    server = pexpect.spawn(
        sys.executable,
        ["-m", "mlx_lm_server", "--host=127.0.0.1", "--port=0", "--no-ssd", *flags],
        cwd=str(ROOT),
        env={**outside, **own, "MLX_LM_SERVER_SPARE_ENGINE_AFTER_S": "0"},
        dimensions=(50, 80),
        timeout=PATIENCE_S,
        encoding="utf-8",
    )
    try:
        server.expect_exact("in a browser")
        text = server.before.replace("\r\n", "\n")
        for done in ("imports", "weights and tokenizer", "the check", "layout and checks"):
            assert re.search(rf"info engine-0: {done} took \d+\.\d s\n", text), text
        assert re.search(r"mlx-lm-server ready: http\S+  \(model \S+, after \d+\.\d s\)\n", text)
        curl = text[text.index("  curl ") :].partition("\n\n")[0]
        assert max(map(len, curl.splitlines())) <= 80
        answer = subprocess.run(
            ["bash", "-c", curl], capture_output=True, text=True, check=True, timeout=PATIENCE_S
        ).stdout
        assert json.loads(answer)["choices"][0]["message"]["role"] == "assistant"
        address = re.findall(r"http://\S+:\d+", curl)[0]
        health = ["curl", "-s", f"{address}/health"]
        blocks = json.loads(subprocess.check_output(health))["models"][0]["engines"][0]["blocks"]
        assert shown(model, flags[1:])["num_blocks"] == blocks["total"]
    finally:
        server.sendintr()
        server.expect(pexpect.EOF)
        server.close(force=True)
    assert server.exitstatus == 0


def shown(model: Path, flags: list[str]) -> dict[str, int]:
    """Return what `models show` says of a model."""
    command = [sys.executable, "-m", "mlx_lm_server", "models", "show", str(model), "--json"]
    found: dict[str, int] = json.loads(subprocess.check_output([*command, *flags], cwd=ROOT))
    return found
