"""`make bench-peers`: what is kept, what is written, and other servers that are not there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.peers import page
from bench.peers.cells import CELLS, OURS, ask, file_of, measured, results_of, serving
from bench.peers.environments import (
    Peer,
    PeerUnavailable,
    folder_of,
    forget_reason,
    install,
    keep_reason,
)
from services.commands.bench.report import LoadReport
from services.measuring.answers import StreamedAnswer
from services.measuring.load import LoadRecord
from tests.services.benchmark.reports import made_level, made_report


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Peer:
    """A server that is installed already and does not start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("bench.peers.cells.demo_gguf", lambda folder: folder)
    monkeypatch.setattr("bench.peers.cells.resolve", Path)
    program = "raise SystemExit('it needs Metal')"

    def command(folder: Path, weights: Path) -> list[str]:
        return [sys.executable, "-c", program]

    return Peer("other", (), command, reads=str(tmp_path), install=lambda folder: None)


def report(label: str, tokens: int, error: str | None = None) -> LoadReport:
    """A report of one level of two seconds."""
    answer = StreamedAnswer(times=[0.5, 1.5], completion_tokens=tokens, has_usage=True)
    records = [LoadRecord("", answer)]
    records += [LoadRecord("", StreamedAnswer(error=error))] if error else []
    return made_report(made_level(*records, concurrency=1), label=label)


def test_pairs_that_are_whole_are_written(peer: Peer, tmp_path: Path) -> None:
    results_of(peer).mkdir(parents=True)
    for cell, ours, theirs in ((CELLS[0], 30, 20), (CELLS[1], 10, 40)):
        file_of(peer, 0, cell, OURS).write_bytes(report(OURS, ours).encode())
        file_of(peer, 0, cell, peer.name).write_bytes(
            report(peer.name, theirs, "HTTP 500").encode()
        )
    file_of(peer, 0, CELLS[2], OURS).write_bytes(report(OURS, 5).encode())
    found = measured(peer)
    assert list(found) == list(CELLS[:2])
    document = tmp_path / "page.md"
    document.write_text(f"before\n{page.BEGIN}\nof an earlier run\n{page.END}\nafter\n")
    (tmp_path / "pictures").mkdir()
    peer = peer._replace(reads="weights", flags=("--precision", "fast"))
    page.write(document, {peer: found}, {peer: "other 1.0"}, {"third": "no wheel"})
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "earlier" not in text
    assert "| other | other 1.0 | `weights, --precision fast` |" in text
    assert "| 128 tokens in, 32 out | 1 | 15.0 / 10.0 = 1.50 |" in text
    assert "| 128 tokens in, 32 out | 2 | **5.0 / 20.0 = 0.25** |" in text
    assert "join" not in text and "| 4 |" not in text
    assert "other, 128 tokens in, 32 out, 1 clients: 1 of its requests failed with HTTP 500" in text
    assert "* third did not run here, or not to the end: `no wheel`" in text


def test_why_one_does_not_run_is_kept_until_it_is_forgotten(peer: Peer) -> None:
    keep_reason(peer, PeerUnavailable("no wheel for this system"))
    with pytest.raises(PeerUnavailable, match="no wheel for this system"):
        install(peer)
    forget_reason(peer)
    assert install(peer) == folder_of(peer)


def test_one_that_does_not_start_says_why(peer: Peer) -> None:
    install(peer)
    with pytest.raises(PeerUnavailable, match="it does not start: it needs Metal"), serving(peer):
        pass


OTHER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Other(BaseHTTPRequestHandler):
    def do_GET(self):
        self.say(b'{"data": [{"id": "m"}]}')
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        event = {"choices": [{"index": 0, "delta": {"content": "!!!!"}}]}
        self.say(f"data: {json.dumps(event)}\\n\\ndata: [DONE]\\n\\n".encode())
    def say(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

HTTPServer(("127.0.0.1", int(sys.argv[2])), Other).serve_forever()
"""


def test_one_that_computes_wrongly_is_not_measured(peer: Peer) -> None:
    install(peer)
    wrong = peer._replace(command=lambda folder, weights: [sys.executable, "-c", OTHER])
    with serving(wrong) as port, pytest.raises(PeerUnavailable, match="with '!!!!'"):
        ask(wrong, port)


def test_a_server_begins_in_an_empty_home(peer: Peer) -> None:
    """What it kept of the prompts of another run would be found again."""
    install(peer)
    keeps = "from pathlib import Path\n(Path.home() / 'kept').touch(exist_ok=False)\n" + OTHER
    keeping = peer._replace(command=lambda folder, weights: [sys.executable, "-c", keeps])
    for _ in range(2):
        with serving(keeping) as port, pytest.raises(PeerUnavailable, match="with '!!!!'"):
            ask(keeping, port)
