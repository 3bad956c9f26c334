"""The `llm` command."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import (
    ANSWER,
    CITIES,
    CITY_SCHEMA,
    KEY,
    LONG,
    MODEL,
    QUESTION,
    URL,
    NotApplicable,
    aborts,
    check,
    check_aborted,
    run,
)

LLM = str(Path(sys.executable).with_name("llm"))
home = Path(tempfile.mkdtemp(prefix="llm-"))
os.environ["LLM_USER_PATH"] = str(home)
served = [
    {
        "model_id": name,
        "model_name": name,
        "api_base": URL + "/v1",
        "api_key_name": "local",
        "supports_tools": True,
        "supports_schema": True,
    }
    for name in (MODEL, "nobody")
]
(home / "extra-openai-models.yaml").write_text(json.dumps(served))  # JSON is YAML
(home / "keys.json").write_text(json.dumps({"local": KEY}))


def llm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [LLM, *arguments]
    closed = subprocess.DEVNULL  # otherwise it reads its prompt from there
    return subprocess.run(command, stdin=closed, capture_output=True, text=True, timeout=120)


def ask(*arguments: str) -> str:
    done = llm("-m", MODEL, QUESTION, "-o", "max_tokens", "60", *arguments)
    check(done.returncode == 0, done.stderr)
    return done.stdout


def chat() -> None:
    check(ANSWER in ask("--no-stream"), "the answer")


def stream() -> None:
    check(ANSWER in ask(), "the answer")


def tools() -> None:
    ask("--functions", "def weather(city: str) -> str:\n    return 'sunny'\n")
    raise NotApplicable("it cannot require a call; an optional call is accepted")


def structured() -> None:
    answer = ask("--schema", json.dumps(CITY_SCHEMA))
    check(json.loads(answer)["city"] in CITIES, answer)


def errors() -> None:
    done = llm("-m", "nobody", QUESTION)
    check(done.returncode != 0 and "nobody" in done.stderr, done.stderr)


def cancel() -> None:
    before = aborts()
    command = [LLM, "-m", MODEL, LONG, "-o", "max_tokens", "1500"]
    running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert running.stdout is not None
    running.stdout.read(2)
    running.kill()
    running.wait()
    check_aborted(before)


run(chat, stream, tools, structured, errors, cancel)
