"""Tool calls as items of the tool's own type, in answers and conversations."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from router.api.output import json_object
from router.api.translation import joined_content, sent_image, with_paths
from router.responses.items import OpenItem
from router.responses.objects import (
    ApplyPatchCallItem,
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    CustomCallItem,
    CustomInputDeltaEvent,
    CustomInputDoneEvent,
    FunctionCallItem,
    LocalShellAction,
    LocalShellCallItem,
    OutputItem,
    PatchOperation,
    SequencedEvent,
    ShellAction,
    ShellCallItem,
    ToolSearchCallItem,
)
from router.responses.schemas import CommandOutcome, InputItem, ItemContentPart
from router.responses.tools import ClientTool, function_name
from router.schemas.conversation import ContentPart, FunctionCall, ToolCall
from router.tokens.json_texts import decoded_json
from router.tokens.reply_parser import CallDelta

_Action = TypeVar("_Action")

_INPUT_BEGUN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_WHOLE_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?:(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}))*"
)
"""The characters of a JSON string, up to its end or an incomplete escape."""


def open_call(tools: Mapping[str, ClientTool], call: CallDelta, index: int) -> OpenItem:
    """Return the item of ``call``; ``tools`` are the callable tools by function name."""
    name = call.name or ""
    tool = tools.get(name)
    call_id = call.id or f"call_{uuid.uuid4().hex}"
    match tool.type if tool else "function":
        case "custom":
            assert tool is not None
            return _OpenCustomCall(tool, call_id, index)
        case "local_shell":
            return _OpenActionCall("lsh_", _local_shell_item, call_id, index)
        case "shell":
            return _OpenActionCall("sh_", _shell_item, call_id, index)
        case "apply_patch":
            return _OpenActionCall("apc_", _patch_item, call_id, index)
        case "tool_search":
            return _OpenActionCall("tsc_", _search_item, call_id, index)
    return _OpenFunctionCall(tool, name, call_id, index)


class _OpenFunctionCall(OpenItem):
    id_prefix = "fc_"

    def __init__(self, tool: ClientTool | None, name: str, call_id: str, index: int) -> None:
        super().__init__(index)
        self._call_id = call_id
        self._name = tool.name if tool else name
        self._namespace = (tool.namespace if tool else None) or UNSET

    def block(self) -> FunctionCallItem:
        return FunctionCallItem(
            id=self.id,
            call_id=self._call_id,
            name=self._name,
            namespace=self._namespace,
            arguments=self.text,
            status=self.status,
        )

    def extend(self, delta: str) -> list[SequencedEvent]:
        return [ArgumentsDeltaEvent(item_id=self.id, output_index=self.index, delta=delta)]

    def end_content(self) -> list[SequencedEvent]:
        return [
            ArgumentsDoneEvent(
                item_id=self.id, output_index=self.index, name=self._name, arguments=self.text
            )
        ]


class _OpenCustomCall(OpenItem):
    id_prefix = "ctc_"

    def __init__(self, tool: ClientTool, call_id: str, index: int) -> None:
        super().__init__(index)
        self._call_id = call_id
        self._tool = tool
        self._streamed = ""  # of the input
        self._position: int | None = (
            None  # position in the JSON text of what follows; None: not begun
        )

    def block(self) -> CustomCallItem:
        return CustomCallItem(
            id=self.id,
            call_id=self._call_id,
            name=self._tool.name,
            namespace=self._tool.namespace or UNSET,
            input=self._input if self.status != "in_progress" else "",
            status=self.status,
        )

    def extend(self, delta: str) -> list[SequencedEvent]:
        if self._position is None:
            begun = _INPUT_BEGUN.match(self.text)
            self._position = begun.end() if begun else None
        if self._position is None:
            return []
        found = _WHOLE_CHARACTERS.match(self.text, self._position)
        assert found is not None  # it may be empty
        self._position = found.end()
        return self._add(str(decoded_json(f'"{found[0]}"', strict=False)))

    def end_content(self) -> list[SequencedEvent]:
        text = self._input
        rest = self._add(text.removeprefix(self._streamed))
        return [*rest, CustomInputDoneEvent(item_id=self.id, output_index=self.index, input=text)]

    def _add(self, text: str) -> list[SequencedEvent]:
        self._streamed += text
        if not text:
            return []
        return [CustomInputDeltaEvent(item_id=self.id, output_index=self.index, delta=text)]

    @property
    def _input(self) -> str:
        arguments = _decoded(self.text)
        text = arguments.get("input") if isinstance(arguments, dict) else None
        if isinstance(text, str) and text.startswith(self._streamed):
            return text
        # Truncated, or not JSON: return what was decoded, else the text as it is.
        return self._streamed + self.text[self._position or 0 :]


class _OpenActionCall(OpenItem):
    """A call whose item has a structured action instead of the arguments' text."""

    def __init__(
        self,
        id_prefix: str,
        make_item: Callable[[OpenItem, str], OutputItem],
        call_id: str,
        index: int,
    ) -> None:
        self.id_prefix = id_prefix
        super().__init__(index)
        self._make_item = make_item
        self._call_id = call_id

    def block(self) -> OutputItem:
        return self._make_item(self, self._call_id)

    def extend(self, delta: str) -> list[SequencedEvent]:
        return []

    def end_content(self) -> list[SequencedEvent]:
        return []


def _local_shell_item(item: OpenItem, call_id: str) -> LocalShellCallItem:
    text = ["bash", "-lc", item.text] if item.text else []
    action = _action(item, LocalShellAction, LocalShellAction(command=text))
    return LocalShellCallItem(id=item.id, call_id=call_id, action=action, status=item.status)


def _shell_item(item: OpenItem, call_id: str) -> ShellCallItem:
    text = [item.text] if item.text else []
    action = _action(item, ShellAction, ShellAction(commands=text))
    return ShellCallItem(id=item.id, call_id=call_id, action=action, status=item.status)


def _patch_item(item: OpenItem, call_id: str) -> ApplyPatchCallItem:
    fallback = PatchOperation(type="update_file", path="", diff=item.text)
    operation = _action(item, PatchOperation, fallback)
    return ApplyPatchCallItem(id=item.id, call_id=call_id, operation=operation, status=item.status)


def _search_item(item: OpenItem, call_id: str) -> ToolSearchCallItem:
    arguments = json_object(item.text)
    return ToolSearchCallItem(id=item.id, call_id=call_id, arguments=arguments, status=item.status)


def _action(item: OpenItem, action_type: type[_Action], fallback: _Action) -> _Action:
    """Return the arguments of a call as its action; ``fallback`` if the model wrote
    invalid ones."""
    try:
        return msgspec.json.decode(item.text, type=action_type)
    except (msgspec.DecodeError, RecursionError):
        return fallback


def _decoded(text: str) -> Any:
    try:
        return decoded_json(text, strict=False)
    except (ValueError, RecursionError):
        return None


# -- in a conversation ---------------------------------------------------------


def tool_call(item: InputItem) -> ToolCall:
    """Return the call of an earlier answer, as the model wrote it."""
    call = FunctionCall(called_function(item) or "", _arguments(item))
    return ToolCall(call, id=item.call_id)


def called_function(item: InputItem) -> str | None:
    """Return the name of the function called by ``item``. None: it is not a call."""
    match item.type:
        case "function_call" | "custom_tool_call":
            return function_name(item.name or "", item.namespace)
        case "local_shell_call" | "shell_call" | "apply_patch_call" | "tool_search_call":
            return item.type.removesuffix("_call")
    return None


def _arguments(item: InputItem) -> str | dict[str, Any] | None:
    match item.type:
        case "custom_tool_call":
            return {"input": item.input}
        case "local_shell_call" | "shell_call":
            unset: tuple[Any, ...] = (None, {}, [])
            action = (item.action or {}).items()
            return {name: value for name, value in action if name != "type" and value not in unset}
        case "apply_patch_call":
            return item.operation
    return item.arguments


def output_content(item: InputItem, path: str) -> str | list[ContentPart]:
    """Return the result of a call as a message's content; ``path`` is the path of ``item``."""
    assert not isinstance(item.output, dict)  # `resolve_input` rejects it
    if item.output is None:
        return item.status or ""
    if isinstance(item.output, str):
        return item.output
    return joined_content(
        (
            sent_image(part.image_url, part_path, "input_image")
            if part.type == "input_image"
            else part.text or part.refusal or _command_result(part)
            for part_path, part in with_paths(item.output, f"{path}.output")
        ),
        "",
    )


def _command_result(part: ItemContentPart) -> str:
    """Return the output of a `shell` tool's command, with its exit code if it failed."""
    written = (part.stdout or "") + (part.stderr or "")
    match part.outcome:
        case CommandOutcome(type="timeout"):
            return f"{written}\n(timeout)\n"
        case CommandOutcome(exit_code=int(code)) if code:
            return f"{written}\n(exit code {code})\n"
    return written
