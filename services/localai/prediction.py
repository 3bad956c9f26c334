"""Translation of a Predict call to a request to the server's API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from services.localai.errors import InvalidCall

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class ApiRequest(NamedTuple):
    path: str
    body: dict[str, Any]


def is_chat(call: Any) -> bool:
    """Return whether the model's own template renders ``call.Messages``."""
    return bool(call.UseTokenizerTemplate and call.Messages and not call.Prompt)


def api_request(call: Any, model: str, defaults: Mapping[str, Any]) -> ApiRequest:
    """Return the request to ``model`` for a ``PredictOptions``.

    ``defaults`` are fields that the model's options set for all calls. The answer is streamed, with
    usage at the end. Raises: `InvalidCall`.
    """
    _refuse_what_is_not_served(call)
    body: dict[str, Any] = {"model": model, **_sampling(call), **defaults}
    if call.Grammar:
        schema = _schema(call.Grammar)
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "grammar", "schema": schema},
        }
    if is_chat(call):
        path = CHAT
        body |= {"messages": messages_of(call), **_tools(call), **_template_arguments(call)}
        if call.Logprobs > 0 or call.TopLogprobs > 0:
            body |= {"logprobs": True, "top_logprobs": call.TopLogprobs}
    elif call.Prompt:
        path = TEXT
        body["prompt"] = call.Prompt
        if call.Logprobs > 0 or call.TopLogprobs > 0:
            body["logprobs"] = max(call.Logprobs, call.TopLogprobs)
    else:
        raise InvalidCall("the call has neither Prompt nor Messages with UseTokenizerTemplate")
    return ApiRequest(path, body | {"stream": True, "stream_options": {"include_usage": True}})


def messages_of(call: Any) -> list[dict[str, Any]]:
    """Return the conversation in the API's format. Raises: `InvalidCall`."""
    return [_message(number, each) for number, each in enumerate(call.Messages)]


def _message(number: int, message: Any) -> dict[str, Any]:
    fields = ("name", "tool_call_id", "reasoning_content")
    given = {name: value for name in fields if (value := getattr(message, name))}
    if message.tool_calls:
        given["tool_calls"] = _json(message.tool_calls, f"Messages[{number}].tool_calls", list)
    return {"role": message.role, "content": message.content, **given}


def _refuse_what_is_not_served(call: Any) -> None:
    for name in ("Images", "Videos", "Audios", "EmbeddingTokens", "Embeddings", "NegativePrompt"):
        if getattr(call, name):
            raise InvalidCall(f"{name} are not supported: the models of this backend read text")


def _sampling(call: Any) -> dict[str, Any]:
    """Return the sampling fields. Zero means unset, except for the temperature, where it means
    greedy."""
    fields: dict[str, Any] = {"temperature": _decimal(call.Temperature)}
    given = {
        "top_p": _decimal(call.TopP),
        "min_p": _decimal(call.MinP),
        "top_k": call.TopK,
        "max_tokens": max(call.Tokens, 0),
        "seed": max(call.Seed, 0),  # a negative seed requests a random one
        "repetition_penalty": _decimal(call.Penalty),
        "frequency_penalty": _decimal(call.FrequencyPenalty),
        "presence_penalty": _decimal(call.PresencePenalty),
        "stop": list(call.StopPrompts),
        "ignore_eos": call.IgnoreEOS,
    }
    fields |= {name: value for name, value in given.items() if value}
    if call.Penalty and call.Repeat > 0:
        fields["repetition_context_size"] = call.Repeat
    if call.LogitBias:
        fields["logit_bias"] = _json(call.LogitBias, "LogitBias", dict)
    return fields


def _decimal(value: float) -> float:
    """Return the intended number: 0.7, not its nearest 32-bit value."""
    return float(f"{value:.7g}")


def _schema(grammar: str) -> Any:
    try:
        schema = json.loads(grammar)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise InvalidCall(
            "Grammar: GBNF grammars are not supported, JSON schemas are; set `function: "
            "{grammar: {disable: true}}` in the model's YAML so that LocalAI generates none for "
            "tools"
        )
    return schema


def _tools(call: Any) -> dict[str, Any]:
    tools = _json(call.Tools, "Tools", list) if call.Tools else []
    if not tools:
        return {}
    if not call.ToolChoice:
        return {"tools": tools}
    try:
        choice = json.loads(call.ToolChoice)
    except (ValueError, RecursionError):
        choice = call.ToolChoice  # a word like auto, passed unchanged
    return {"tools": tools, "tool_choice": choice}


def _template_arguments(call: Any) -> dict[str, Any]:
    """Return the template options in ``Metadata``; its other entries are LocalAI's own."""
    given, fields = call.Metadata, dict[str, Any]()
    if "chat_template_kwargs" in given:
        name = "Metadata[chat_template_kwargs]"
        fields["chat_template_kwargs"] = _json(given["chat_template_kwargs"], name, dict)
    if thinking := given.get("enable_thinking", "").lower():
        if thinking not in ("true", "false"):
            raise InvalidCall(f"Metadata[enable_thinking] is {thinking!r}, not true or false")
        fields["enable_thinking"] = thinking == "true"
    if effort := given.get("reasoning_effort", ""):
        fields["reasoning_effort"] = effort
    return fields


def _json(text: str, name: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        noun = "list" if kind is list else "object"
        raise InvalidCall(f"{name} is not a JSON {noun}")
    return value
