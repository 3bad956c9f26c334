"""Translation of a LoadModel call to flags of the server and fields of requests."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from services.localai.errors import InvalidCall
from shared.flags import FlagError
from shared.settings import Settings, read

PROG = "mlx-lm-server localai"

_REQUEST_FIELDS = {"temp": "temperature"} | {
    name: name
    for name in "temperature top_p min_p top_k max_tokens seed xtc_threshold xtc_probability"
    " repetition_penalty presence_penalty frequency_penalty".split()
}
"""Options of LocalAI's mlx backend that apply to every request -> our field."""

_NOT_NEEDED = frozenset(("max_cache_entries", "unk_token", "sep_token", "cls_token", "mask_token"))
"""Options of that backend without effect here: memory limits the prefix cache, and the other tokens
are read from the tokenizer's files."""

_NOT_FOR_MODELS = frozenset(
    "config host port model engine_socket kvstore_socket ssl_certfile ssl_keyfile root_path"
    " api_key api_key_file admin_key".split()
)
"""Settings that only the operator of the server may choose."""


class LoadRequest(NamedTuple):
    model: str
    """A directory, or a Hugging Face model id."""
    flags: tuple[str, ...]
    """Flags of `mlx-lm-server serve`, without the address."""
    defaults: dict[str, Any]
    """Fields of all requests."""
    ignored: tuple[str, ...]
    """Names of unknown options."""
    max_bytes: int | None
    """Max size of a request; None: the server's own."""


def load_request(call: Any) -> LoadRequest:
    """Translate a ``ModelOptions``. Raises: `InvalidCall`."""
    if not call.Model:
        raise InvalidCall("Model is empty")
    for name in ("Embeddings", "Reranking"):
        if getattr(call, name):
            raise InvalidCall(f"{name}: this backend only generates text")
    model = _existing(call.ModelFile) or call.Model
    settings: dict[str, Any] = dict(_settings_of_fields(call))
    defaults: dict[str, Any] = {}
    ignored = []
    options: dict[str, Any] = {}
    for name, value in _options(call.Options):
        if name == "adapter":  # may be repeated
            options.setdefault(name, []).append(value)
        else:
            options[name] = value
    engine_args = _engine_args(call.EngineArgs)
    known = {field.name for field in dataclasses.fields(Settings)} - _NOT_FOR_MODELS
    for name, value in {**options, **engine_args}.items():
        name = name.replace("-", "_")
        if name in _REQUEST_FIELDS:
            defaults[_REQUEST_FIELDS[name]] = _number(name, value)
        elif name in known:
            settings[name] = value
        elif name in engine_args:
            raise InvalidCall(f"EngineArgs: {name!r} is not a model setting")
        elif name not in _NOT_NEEDED:
            ignored.append(name)
    flags = ("--model", model, *_flags(settings))
    try:
        read_settings, _, _ = read([*flags, "--host=127.0.0.1"], os.environ, PROG)
    except FlagError as error:
        raise InvalidCall(str(error)) from None
    return LoadRequest(model, flags, defaults, tuple(ignored), read_settings.max_request_bytes)


def _settings_of_fields(call: Any) -> Iterator[tuple[str, Any]]:
    if call.TrustRemoteCode:
        yield "trust_remote_code", True
    if call.MaxModelLen > 0:
        yield "max_kv_size", call.MaxModelLen
    if call.TensorParallelSize > 1:
        yield "distributed_mode", "ring"
        yield "num_local_ranks", call.TensorParallelSize
    if call.DraftModel:
        yield "spec_decode", "draft"
        yield "draft_model_path", _draft_model(call)
    adapters = [*filter(None, (call.LoraAdapter, *call.LoraAdapters))]
    if len(adapters) > 1:
        raise InvalidCall("LoraAdapters: this backend supports one adapter per model")
    if adapters:
        yield "adapter_path", adapters[0]


def _draft_model(call: Any) -> str:
    """Return the directory, or the Hugging Face model id that LocalAI took for a path in its models
    folder."""
    if _existing(call.DraftModel) or not call.ModelPath:
        return str(call.DraftModel)
    return str(call.DraftModel).removeprefix(call.ModelPath.rstrip("/") + "/")


def _existing(path: str) -> str | None:
    return path if path and Path(path).is_dir() else None


def _options(options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield names and values of ``name:value``; like LocalAI's backends, skip options without a
    colon."""
    for option in options:
        name, colon, value = option.partition(":")
        if colon:
            yield name.strip(), value.strip()


def _engine_args(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        return {name.replace("-", "_"): value for name, value in json.loads(text).items()}
    except (ValueError, AttributeError, RecursionError):
        raise InvalidCall("EngineArgs is not a JSON object") from None


def _number(name: str, value: Any) -> int | float:
    try:
        return msgspec.convert(value, int | float, strict=False)
    except msgspec.ValidationError:
        raise InvalidCall(f"Options: {name} is {value!r}, which is not a number") from None


def _flags(settings: Mapping[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if str(value).lower() in ("true", "false"):
            yield f"--{flag}" if str(value).lower() == "true" else f"--no-{flag}"
        elif isinstance(value, list | tuple):
            yield from (f"--{flag}={each}" for each in value)
        else:
            yield f"--{flag}={json.dumps(value) if isinstance(value, dict) else value}"
