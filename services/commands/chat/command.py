"""The command: its flags, one question from a pipe, or a conversation in the terminal."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from services.commands.admin_client import EXIT_NO_SERVER, NoServer, ServerRefused, add_server_flags
from services.commands.chat.client import ChatClient, Reply
from services.commands.chat.conversation import Dialogue
from services.commands.parser import CommandParser
from services.commands.printing import printable
from shared.exits import EXIT_FAILED, EXIT_OK, fail

PROG = "mlx-lm-server chat"
KEY_VARIABLE = "MLX_LM_SERVER_API_KEY"
_PARAMETERS = ("temperature", "top_p", "max_tokens", "seed")


def main(argv: Sequence[str]) -> int:
    """Chat with a model; return the exit code."""
    options = parser().parse_args(argv)
    client = ChatClient(options.url, os.environ.get(options.key_variable, ""), options.key_variable)
    question = " ".join(options.question)
    try:
        if not sys.stdin.isatty():
            piped = sys.stdin.buffer.read().decode(errors="replace").strip()
            question = "\n\n".join(filter(None, [question, piped]))
            if not question:
                return fail(PROG, "no question: standard input is empty", EXIT_FAILED)
        conversation = Dialogue(
            model=options.model or _first_model(client),
            system=options.system,
            parameters=_parameters(options),
        )
        if question:
            return _answer_once(client, conversation, question)
        from services.commands.chat.terminal import (
            converse,
        )  # whose libraries are not needed in a pipe

        return converse(client, conversation, keep_history=not options.no_history)
    except ServerRefused as error:
        return fail(PROG, error, EXIT_FAILED)
    except NoServer as error:
        return fail(PROG, error, EXIT_NO_SERVER)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog=PROG,
        description="Chat with a model of a running server, or of any other server with OpenAI's "
        "API. A question given as an argument, through a pipe, or both is answered "
        "once.",
        epilog="Exit codes: 0 done, 1 the server refused, 2 invalid arguments, "
        "3 no server responds.",
    )
    made.add_argument(
        "question", nargs="*", metavar="QUESTION", help="question to answer before exiting"
    )
    add_server_flags(made, admin=False)
    made.add_argument("--model", help="model (default: the server's first model)")
    made.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    made.add_argument("--temperature", type=float, metavar="X", help="(default: server default)")
    made.add_argument("--top-p", type=float, metavar="X", help="(default: server default)")
    made.add_argument("--max-tokens", type=int, metavar="N", help="(default: server default)")
    made.add_argument("--seed", type=int, metavar="N", help="(default: random)")
    made.add_argument(
        "--key-variable",
        default=KEY_VARIABLE,
        metavar="NAME",
        help="environment variable with the API key (default: %(default)s)",
    )
    made.add_argument("--no-history", action="store_true", help="do not store the input history")
    return made


def _parameters(options: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in _PARAMETERS}
    return {name: value for name, value in given.items() if value is not None}


def _first_model(client: ChatClient) -> str:
    found = client.models()
    if not found:
        raise ServerRefused("the server has no ready model")
    return found[0]


def _answer_once(client: ChatClient, conversation: Dialogue, question: str) -> int:
    """Write only the answer, because another program may read it."""
    conversation.ask(question)
    to_terminal = sys.stdout.isatty()
    for text, _ in client.answer(
        conversation.model, conversation.messages(), conversation.parameters, Reply()
    ):
        sys.stdout.write(printable(text) if to_terminal else text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return EXIT_OK
