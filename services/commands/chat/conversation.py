"""A conversation, and the commands that change it."""

from __future__ import annotations

import base64
import json
import mimetypes
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.commands.chat.client import ChatClient
from shared.paths import user_path

_MAX_IMAGE_BYTES = 20 << 20
"""Larger files are not images that a server accepts."""


class CommandError(Exception):
    """An invalid command; the message is one line for the user."""


@dataclass
class Dialogue:
    """The messages so far, with the model and the parameters."""

    model: str
    system: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)  # of requests, by their OpenAI names
    turns: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    """`data:` URLs to send with the next question."""

    def messages(self) -> list[dict[str, Any]]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns]

    def ask(self, text: str) -> None:
        content: Any = text
        if self.images:
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
            content = [*parts, {"type": "text", "text": text}]
            self.images = []
        self.turns.append({"role": "user", "content": content})

    def note_answer(self, text: str) -> None:
        self.turns.append({"role": "assistant", "content": text})

    def take_back(self) -> str:
        """Remove the last question and its answer, and return the question; "" if there is none.
        Its images are sent with the next question."""
        while self.turns:
            turn = self.turns.pop()
            if turn["role"] == "user":
                content = turn["content"]
                if isinstance(content, str):
                    return content
                images = [part["image_url"]["url"] for part in content if "image_url" in part]
                self.images = [*images, *self.images]
                return "".join(part.get("text", "") for part in content)
        return ""


class Commands:
    """The action of a line that begins with /."""

    def __init__(self, conversation: Dialogue, client: ChatClient) -> None:
        self._conversation, self._client = conversation, client
        self.retry = ""
        """The question to ask again."""
        self.ended = False

    def run(self, line: str) -> str:
        """Run the command in ``line``, and return the text to show. Raises `CommandError`, and the
        client's errors."""
        name, _, rest = line.partition(" ")
        command = COMMANDS.get(name)
        if command is None:
            raise CommandError(f"unknown command {name}; /help lists the commands")
        return command[0](self, rest.strip())

    def help(self, _: str) -> str:
        rows = [f"  {usage:<18}{help}" for _, usage, help in COMMANDS.values()]
        return "\n".join(
            [*rows, "  Enter sends, Alt+Enter starts a new line, Ctrl-C stops an answer"]
        )

    def image(self, name: str) -> str:
        if not name:
            self._conversation.images.clear()
            return "images removed"
        path = _file(name)
        try:
            if path.stat().st_size > _MAX_IMAGE_BYTES:
                raise CommandError(f"{path} is larger than {_MAX_IMAGE_BYTES >> 20} MB")
            content = path.read_bytes()
        except OSError as error:
            raise CommandError(f"cannot read {path}: {error.strerror}") from None
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        url = f"data:{kind};base64,{base64.b64encode(content).decode()}"
        self._conversation.images.append(url)
        return f"{path.name} will be sent with the next question"

    def clear(self, _: str) -> str:
        self._conversation.turns.clear()
        self._conversation.images.clear()
        return "new conversation"

    def again(self, _: str) -> str:
        self.retry = self._conversation.take_back()
        if not self.retry:
            raise CommandError("there is no question to repeat")
        return ""

    def undo(self, _: str) -> str:
        question = self._conversation.take_back()
        return f"removed: {question}" if question else "there is no question to remove"

    def system(self, text: str) -> str:
        self._conversation.system = text
        return "system prompt set" if text else "system prompt removed"

    def model(self, name: str) -> str:
        known = self._client.models()
        if not name:
            now = self._conversation.model
            return "\n".join(f"{'*' if each == now else ' '} {each}" for each in known)
        if name not in known:
            raise CommandError(f"the server has no model {name}; its models are {', '.join(known)}")
        self._conversation.model = name
        return f"model {name}"

    def set(self, text: str) -> str:
        name, _, value = text.partition(" ")
        parameters = self._conversation.parameters
        if name and value:
            try:
                parameters[name] = json.loads(value)
            except ValueError:
                parameters[name] = value
        elif name:
            parameters.pop(name, None)
        shown = (f"{name} {json.dumps(value)}" for name, value in parameters.items())
        return "\n".join(shown) or "all parameters have the server's defaults"

    def save(self, name: str) -> str:
        path = _file(name)
        text = json.dumps(self._conversation.messages(), indent=1, ensure_ascii=False)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise CommandError(f"cannot write {path}: {error.strerror}") from None
        return f"saved to {path}"

    def load(self, name: str) -> str:
        path = _file(name)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            turns = [
                {"role": str(one["role"]), "content": _content(one["content"])} for one in found
            ]
        except OSError as error:
            raise CommandError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, TypeError, KeyError):
            raise CommandError(f"{path} is not a list of messages written by /save") from None
        system = [one["content"] for one in turns if one["role"] == "system"]
        self._conversation.system = "\n".join(system)
        self._conversation.turns = [one for one in turns if one["role"] != "system"]
        return f"{len(self._conversation.turns)} messages"

    def quit(self, _: str) -> str:
        self.ended = True
        return ""


def _content(given: Any) -> Any:
    """Return the content of a saved message: text, or text and images."""
    if not isinstance(given, list):
        return str(given)
    for part in given:
        str(part["image_url"]["url"] if "image_url" in part else part["text"])
    return given


def _file(name: str) -> Path:
    if not name:
        raise CommandError("a file name is missing")
    return user_path(name)


COMMANDS: dict[str, tuple[Callable[[Commands, str], str], str, str]] = {
    "/help": (Commands.help, "/help", "show this list"),
    "/clear": (Commands.clear, "/clear", "start a new conversation"),
    "/retry": (Commands.again, "/retry", "ask the last question again"),
    "/undo": (Commands.undo, "/undo", "remove the last question and its answer"),
    "/image": (
        Commands.image,
        "/image [FILE]",
        "add a picture to the next question, or remove all",
    ),
    "/system": (Commands.system, "/system [TEXT]", "set the system prompt, or remove it"),
    "/model": (Commands.model, "/model [NAME]", "list the models, or switch to another"),
    "/set": (Commands.set, "/set [NAME VALUE]", "set a parameter of requests, such as temperature"),
    "/save": (Commands.save, "/save FILE", "write the conversation as JSON"),
    "/load": (Commands.load, "/load FILE", "load a saved conversation"),
    "/quit": (Commands.quit, "/quit", "quit, like Ctrl-D"),
}
"""Name -> (method, syntax of the argument, help)."""
