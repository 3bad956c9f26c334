"""What every scenario needs. Only the client is installed where it runs, not this project."""

import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable

URL = os.environ["CLIENT_URL"]
KEY = os.environ["CLIENT_KEY"]
MODEL = os.environ["CLIENT_MODEL"]
CALLER = os.environ.get("CLIENT_CALLER", "")
"""A second server, whose model calls tools: it goes by the same name and key."""
QUESTION = "What is the capital of France?"
ANSWER = "Paris"
LONG = "Count from 1 to 1000, one number a line."
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CITIES = ("Paris", "Rome")


class NotApplicable(Exception):
    """The client does not support the scenario."""


def check(condition: object, what: object) -> None:
    if not condition:
        raise AssertionError(str(what))


def aborts() -> float:
    return counted("mlx_lm_server_aborts_total")


def answers(path: str) -> float:
    """Return how many requests of ``path`` have had an answer with 200."""
    return counted(f'mlx_lm_server_requests_total{{path="{path}",status="200"}}')


def counted(name: str) -> float:
    """Return the sum of the server's metrics whose lines begin with ``name``."""
    request = urllib.request.Request(URL + "/metrics", headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def check_aborted(before: float) -> None:
    """Check that more requests are aborted than ``before``: the server saw the disconnection."""
    deadline = time.monotonic() + 90
    while aborts() <= before:
        check(time.monotonic() < deadline, "the server continued after the client disconnected")
        time.sleep(0.1)


def run(*scenarios: Callable[[], None]) -> None:
    """Run the scenarios named in the arguments, or all. Print a line of JSON for each."""
    wanted = sys.argv[1:]
    for scenario in scenarios:
        name = scenario.__name__
        if wanted and name not in wanted:
            continue
        try:
            scenario()
            result, reason = "pass", ""
        except NotApplicable as error:
            result, reason = "n/a", str(error)
        except Exception as error:
            traceback.print_exc()
            result, reason = "fail", f"{type(error).__name__}: {error}"
        print(json.dumps({"scenario": name, "result": result, "reason": reason}), flush=True)
