"""The conversation in a terminal: line editing with history and completion, streamed answers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console

from services.commands.admin_client import NoServer, ServerRefused
from services.commands.chat.client import ChatClient, Reply
from services.commands.chat.conversation import COMMANDS, CommandError, Commands, Dialogue
from services.commands.printing import printable
from shared.exits import EXIT_OK

_PROMPT = "> "


def converse(client: ChatClient, conversation: Dialogue, *, keep_history: bool) -> int:
    """Chat until the user quits; return the exit code."""
    console = Console(highlight=False, markup=False, emoji=False)
    commands = Commands(conversation, client)
    session: PromptSession[str] = PromptSession(
        history=_history() if keep_history else InMemoryHistory(),
        completer=_CommandCompleter(),
        complete_while_typing=False,
        key_bindings=_keys(),
        enable_open_in_editor=True,
    )
    console.print(f"{conversation.model} at {client.base}. /help lists commands.", style="dim")
    while not commands.ended:
        try:
            line = session.prompt(_PROMPT).strip()
        except KeyboardInterrupt:
            continue  # discard the line, like a shell
        except EOFError:
            break
        try:
            if line.startswith("/"):
                if shown := commands.run(line):
                    console.print(printable(shown), style="dim")
                line, commands.retry = commands.retry, ""
            if line:
                _answer(console, client, conversation, line)
        except (CommandError, ServerRefused, NoServer) as error:
            console.print(printable(str(error)), style="red")
    return EXIT_OK


def _answer(console: Console, client: ChatClient, conversation: Dialogue, line: str) -> None:
    """Ask the question, and show the answer as it arrives. If there is no answer at all, remove the
    question again."""
    conversation.ask(line)
    reply, stopped = Reply(), False
    try:
        with closing(
            client.answer(
                conversation.model, conversation.messages(), conversation.parameters, reply
            )
        ) as pieces:
            for text, reasoning in pieces:
                console.print(printable(reasoning), style="dim italic", end="", soft_wrap=True)
                if text and reply.reasoning and reply.text == text:
                    console.print("\n")
                console.print(printable(text), end="", soft_wrap=True)
    except KeyboardInterrupt:
        stopped = True
    finally:
        if reply.text or reply.reasoning:
            console.print()
        if reply.text:
            conversation.note_answer(reply.text)
        else:
            conversation.take_back()
    console.print(("stopped: " if stopped else "") + reply.summary(), style="dim")


def _history() -> History:
    """Return the input history, stored in a file that only its user can read."""
    base = os.environ.get("XDG_STATE_HOME")
    folder = (Path(base) if base else Path.home() / ".local" / "state") / "mlx-lm-server"
    path = folder / "chat-history"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    except OSError as error:
        sys.stderr.write(
            f"cannot write {path} ({error.strerror}): the input history is not stored\n"
        )
        return InMemoryHistory()
    return FileHistory(str(path))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class _CommandCompleter(Completer):
    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        typed = document.text_before_cursor
        if typed.startswith("/") and " " not in typed:
            for name in COMMANDS:
                if name.startswith(typed):
                    yield Completion(name, start_position=-len(typed))
