"""`mlx-lm-server decide`: ask a running server typed questions about a text."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.commands.admin_client import (
    EXIT_NO_SERVER,
    NoServer,
    ServerRefused,
    add_json_flag,
    add_server_flags,
    json_object,
    table,
)
from services.commands.event_stream import opened
from services.commands.parser import CommandParser
from services.commands.printing import printable
from shared.exits import EXIT_FAILED, EXIT_OK, EXIT_USAGE, fail

PROG = "mlx-lm-server decide"
KEY_VARIABLE = "MLX_LM_SERVER_API_KEY"
_TIMEOUT_S = 600.0
_SHOWN_OPTIONS = 4


def main(argv: Sequence[str]) -> int:
    """Ask, and print a table or JSON; return the exit code."""
    made = parser()
    options = made.parse_args(argv)
    try:
        questions = _questions(options)
        if not questions:
            return fail(PROG, "no question: use --yes-no, --choice, --score or --questions", 2)
        state = _state(options.state)
    except (OSError, ValueError) as error:
        return fail(PROG, error, EXIT_USAGE)
    body: dict[str, Any] = {"state": state, "questions": questions}
    for name in ("model", "samples", "temperature"):
        if (value := getattr(options, name)) is not None:
            body[name] = value
    url = options.url.rstrip("/").removesuffix("/v1")
    key = os.environ.get(options.key_variable, "")
    try:
        with opened(f"{url}/v1/systemone", key, _TIMEOUT_S, body) as answer:
            text = answer.read()
        found = json_object(text)
        if found is None or not isinstance(found["answers"], dict):
            return fail(PROG, f"{url} is not a server that answers questions", EXIT_FAILED)
        if options.json:
            sys.stdout.write(json.dumps(found, ensure_ascii=False) + "\n")
            return EXIT_OK
        rows: list[list[object]] = [["QUESTION", "ANSWER", "CONFIDENCE", "LABELS", "OPTIONS"]]
        rows += [_row(name, answer) for name, answer in found["answers"].items()]
        sys.stdout.write(table(rows) + "\n")
    except ServerRefused as error:
        return fail(PROG, error, EXIT_FAILED)
    except NoServer as error:
        return fail(PROG, error, EXIT_NO_SERVER)
    return EXIT_OK


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog=PROG,
        description="Ask a running server typed questions about a text, and print the answers with "
        "their probabilities. docs/decisions.md describes them.",
        epilog="Exit codes: 0 done, 1 the server refused, 2 invalid arguments, 3 no server "
        "responds.",
    )
    made.add_argument(
        "--state", default="-", metavar="FILE", help="the text (default: standard input)"
    )
    for name, what in (
        ("yes-no", "a question that is answered with yes or no"),
        ("choice", "a question, and the options that it is between"),
        ("score", "a question, and the levels of its scale, the lowest first"),
    ):
        made.add_argument(
            f"--{name}",
            action="append",
            default=[],
            nargs=None if name == "yes-no" else "+",
            metavar="QUESTION" if name == "yes-no" else ("QUESTION", "OPTION"),
            help=f"{what}; may be repeated",
        )
    made.add_argument(
        "--questions",
        metavar="FILE",
        help="JSON object of questions by id, as /v1/systemone takes them",
    )
    add_server_flags(made, admin=False)
    made.add_argument("--model", help="model (default: the server's first model)")
    made.add_argument(
        "--samples", type=int, metavar="N", help="orders of the options to average over, 1 to 8"
    )
    made.add_argument(
        "--temperature", type=float, metavar="X", help="(default: the model's setting)"
    )
    made.add_argument(
        "--key-variable",
        default=KEY_VARIABLE,
        metavar="NAME",
        help="environment variable with the API key (default: %(default)s)",
    )
    add_json_flag(made)
    return made


def _questions(options: argparse.Namespace) -> dict[str, Any]:
    """Return the questions by id: those of the flags are their own ids. Raises ValueError for
    invalid ones, and OSError."""
    found: dict[str, Any] = {}
    if options.questions is not None:
        try:
            found = json.loads(Path(options.questions).read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"--questions: {options.questions} is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ValueError(f"--questions: {options.questions} is not a JSON object")
    for text in options.yes_no:
        found[text] = {"type": "noul", "instructions": text}
    for kind in ("choice", "score"):
        for text, *criteria in getattr(options, kind):
            if not criteria:
                raise ValueError(f"--{kind}: {text!r} has no options")
            found[text] = {"type": kind, "instructions": text, "criteria": criteria}
    return found


def _state(name: str) -> str:
    content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    return content.decode(errors="replace")


def _row(name: str, answer: Any) -> list[object]:
    """Return the row of one answer in the table."""
    kind = answer["type"]
    probabilities = answer.get("probabilities") or {}
    if kind == "noul":
        shown, confidence = f"{answer['noul']:.3f}", ""
    elif kind == "score":
        shown, confidence = f"{answer['score']:.2f}", f"{answer['confidence']:.3f}"
        legend = answer["legend"]
        probabilities = {str(legend[level]): p for level, p in probabilities.items()}
    elif kind == "choice":
        shown, confidence = answer["choice"], f"{answer['confidence']:.3f}"
    else:
        shown, confidence = json.dumps(answer.get("value"), ensure_ascii=False), ""
    best = sorted(probabilities.items(), key=lambda each: -each[1])
    listed = ", ".join(f"{option} {p:.3f}" for option, p in best[:_SHOWN_OPTIONS])
    listed += ", ..." if len(best) > _SHOWN_OPTIONS else ""
    cells = (name, str(shown), confidence, f"{answer.get('label_mass', 1):.3f}", listed)
    return [" ".join(printable(cell).split()) for cell in cells]
