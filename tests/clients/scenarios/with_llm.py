"""The `llm` command."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import harness as h

LLM = str(Path(sys.executable).with_name("llm"))
home = Path(tempfile.mkdtemp(prefix="llm-"))
os.environ["LLM_USER_PATH"] = str(home)
served = [
    {
        "model_id": name,
        "model_name": name,
        "api_base": h.URL + "/v1",
        "api_key_name": "local",
        "supports_tools": True,
        "supports_schema": True,
    }
    for name in (h.MODEL, "nobody")
]
(home / "extra-openai-models.yaml").write_text(json.dumps(served))  # JSON is YAML
(home / "keys.json").write_text(json.dumps({"local": h.KEY}))


def llm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [LLM, *arguments]
    closed = subprocess.DEVNULL  # otherwise it reads its prompt from there
    return subprocess.run(command, stdin=closed, capture_output=True, text=True, timeout=120)


def ask(*arguments: str) -> str:
    done = llm("-m", h.MODEL, h.QUESTION, "-o", "max_tokens", "60", *arguments)
    h.check(done.returncode == 0, done.stderr)
    return done.stdout


def chat() -> None:
    h.check(h.ANSWER in ask("--no-stream"), "the answer")


def stream() -> None:
    h.check(h.ANSWER in ask(), "the answer")


def tools() -> None:
    ask("--functions", "def weather(city: str) -> str:\n    return 'sunny'\n")
    raise h.NotApplicable("it cannot require a call; an optional call is accepted")


def structured() -> None:
    answer = ask("--schema", json.dumps(h.CITY_SCHEMA))
    h.check(json.loads(answer)["city"] in h.CITIES, answer)


def errors() -> None:
    done = llm("-m", "nobody", h.QUESTION)
    h.check(done.returncode != 0 and "nobody" in done.stderr, done.stderr)


def cancel() -> None:
    before = h.aborts()
    command = [LLM, "-m", h.MODEL, h.LONG, "-o", "max_tokens", "1500"]
    running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert running.stdout is not None
    running.stdout.read(2)
    running.kill()
    running.wait()
    h.check_aborted(before)


h.run(chat, stream, tools, structured, errors, cancel)
