"""`mlx-lm-server decide`: what it sends, and what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT

ANSWERS: dict[str, Any] = {
    "team": {
        "type": "choice",
        "choice": "billing",
        "confidence": 0.96,
        "probabilities": {"shipping": 0.02, "billing": 0.98},
        "label_mass": 0.9,
    },
    "angry": {"type": "noul", "noul": 0.6321, "label_mass": 0.5},
    "urgent": {
        "type": "score",
        "score": 1.2,
        "confidence": 0.4,
        "legend": {"0": "later\x1b[2J", "1": "now"},
        "probabilities": {"0": 0.1, "1": 0.9},
        "label_mass": 1,
    },
    "tags": {"type": "multi_label", "value": ["a"], "probabilities": {"a": 0.8}, "label_mass": 1},
}


class Recorder(ThreadingHTTPServer):
    """A server that answers with `ANSWERS`, unless a request asks about nothing."""

    received: list[tuple[str, str, Any]]


class Handler(BaseHTTPRequestHandler):
    server: Recorder

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.received.append((self.path, self.headers.get("authorization", ""), body))
        answer: Any = {"model": "m", "answers": ANSWERS, "usage": {}}
        status = 200
        if not body["state"]:
            status, answer = 422, {"error": {"message": "'state' is required."}}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Recorder]:
    running = Recorder(("127.0.0.1", 0), Handler)
    running.received = []
    thread = threading.Thread(target=running.serve_forever, args=(0.05,))
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def decide(server: Recorder | None, *argv: str, state: str = "x") -> Any:
    url = f"http://127.0.0.1:{server.server_port}/v1" if server else "http://127.0.0.1:9"
    return subprocess.run(
        [sys.executable, "-m", "mlx_lm_server", "decide", "--url", url, *argv],
        cwd=ROOT,
        input=state,
        capture_output=True,
        text=True,
        check=False,
        env={"MLX_LM_SERVER_API_KEY": "sesame", "PATH": "/bin"},
    )


def test_questions_of_flags_are_sent_and_answers_are_a_table(
    server: Recorder, tmp_path: Path
) -> None:
    (tmp_path / "mail.txt").write_text("Charged twice.")
    (tmp_path / "more.json").write_text('{"tags": {"type": "multi_label", "criteria": ["a"]}}')
    asked = ("--yes-no", "Angry?", "--choice", "Who?", "billing", "shipping", "--yes-no", "Late?")
    files = "--state", str(tmp_path / "mail.txt"), "--questions", str(tmp_path / "more.json")
    ran = decide(server, *files, *asked, "--score", "How?", "bad", "good", "--samples", "3")
    assert ran.returncode == 0, ran.stderr
    ((path, key, body),) = server.received
    assert (path, key) == ("/v1/systemone", "Bearer sesame")
    assert body == {
        "state": "Charged twice.",
        "samples": 3,
        "questions": {
            "tags": {"type": "multi_label", "criteria": ["a"]},
            "Angry?": {"type": "noul", "instructions": "Angry?"},
            "Late?": {"type": "noul", "instructions": "Late?"},
            "Who?": {"type": "choice", "instructions": "Who?", "criteria": ["billing", "shipping"]},
            "How?": {"type": "score", "instructions": "How?", "criteria": ["bad", "good"]},
        },
    }
    rows = [line.split() for line in ran.stdout.splitlines()]
    assert rows[1][:4] == ["team", "billing", "0.960", "0.900"]
    assert "billing 0.980, shipping 0.020" in ran.stdout and "\x1b" not in ran.stdout
    assert rows[2] == ["angry", "0.632", "0.500"]
    assert rows[3][:3] == ["urgent", "1.20", "0.400"] and "now 0.900" in ran.stdout
    assert rows[4][:2] == ["tags", '["a"]']


def test_json_is_the_servers_answer(server: Recorder) -> None:
    ran = decide(server, "--yes-no", "Angry?", "--json", state="piped")
    assert json.loads(ran.stdout)["answers"] == ANSWERS
    assert server.received[0][2]["state"] == "piped"


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        ((), 2, "no question"),
        (("--choice", "Who?"), 2, "no options"),
        (("--questions", "/nowhere.json"), 2, "/nowhere.json"),
        (("--questions", str(ROOT / "LICENSE")), 2, "not JSON"),
        (("--yes-no", "x", "--state", "/nowhere"), 2, "/nowhere"),
        (("--yes-no", "x", "--samples", "many"), 2, "--samples"),
        (("--yes-no", "x", "--state", "/dev/null"), 1, "'state' is required."),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_are_one_line(server: Recorder, argv: tuple[str, ...], code: int, says: str) -> None:
    ran = decide(server, *argv)
    assert ran.returncode == code and says in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_a_server_that_is_not_there_is_named() -> None:
    ran = decide(None, "--yes-no", "x")
    assert ran.returncode == 3 and "no server responds" in ran.stderr
