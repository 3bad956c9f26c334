"""What every scenario needs. It runs where a client is installed, and nothing else of ours."""

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
    """The client has no such thing."""


def check(condition: object, what: object) -> None:
    if not condition:
        raise AssertionError(str(what))


def aborts() -> float:
    request = urllib.request.Request(URL + "/metrics", headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    name = "mlx_lm_server_aborts_total"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def check_aborted(before: float) -> None:
    """Whether a request has been given up since ``before``: the server has seen the client go."""
    deadline = time.monotonic() + 30
    while aborts() <= before:
        check(time.monotonic() < deadline, "the server went on after the client had gone")
        time.sleep(0.1)


def run(*scenarios: Callable[[], None]) -> None:
    """Runs those that are named in the arguments, or all, and prints a JSON line for each."""
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
