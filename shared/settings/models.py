"""The models of a server, each with its own settings, from ``[[model]]`` in the TOML file.

The flags are the defaults for all models. Without ``[[model]]`` there is one model, ``--model``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from shared.flags import FlagError, arguments, flags_of, from_table, values_of, variables_of
from shared.settings.adapters import AdapterSettings, from_tables
from shared.settings.checks import check
from shared.settings.groups import (
    BatchingSettings,
    GenerationSettings,
    KVCacheSettings,
    ModelSettings,
    Settings,
)
from shared.settings.machines import DistributedSettings
from shared.settings.speculation import SpeculationSettings

_GROUPS = (
    ModelSettings,
    AdapterSettings,
    KVCacheSettings,
    BatchingSettings,
    GenerationSettings,
    SpeculationSettings,
    DistributedSettings,
)
_NOT_BY_MODEL = ("model", "served_model_name")
_FURTHER = (
    *("engines", "memory_pressure_threshold", "stall_timeout_s", "max_concurrent_requests"),
    *("ray_label", "max_engines", "scale_down_s"),
)
_OF_THE_FLEET = ("engines", "max_engines", "scale_down_s")
"""Settings of the number of engines; a change needs no restart."""
_FILES_OF_THE_ROUTER = {"api_key_file", "ssl_certfile", "ssl_keyfile"}
FLAGS = flags_of(Settings)
MODEL_FLAGS = [
    flag
    for flag in FLAGS
    if flag.field in _FURTHER
    or (flag.group in {group.GROUP for group in _GROUPS} and flag.field not in _NOT_BY_MODEL)
]
"""The flags that a ``[[model]]`` table may set."""
VARIABLES = variables_of(FLAGS)
"""The environment variables that are settings."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """A model to serve."""

    settings: Settings
    """All settings as they apply to this model."""
    pinned: bool = False  # never unloaded to make room for others
    alone: bool = False  # comes from --model, and is the only one

    @property
    def names(self) -> tuple[str, ...]:
        """Return the model's names in the API, its own name first."""
        return self.settings.served_model_name or (self.settings.model,)

    @property
    def id(self) -> str:
        return self.names[0]

    def arguments(self) -> list[str]:
        """Return the command line that gives an engine these settings, without secrets."""
        return command_line(self.settings)


def model_entries(
    settings: Settings, tables: Sequence[Any], where: str
) -> tuple[tuple[ModelEntry, ...], list[str]]:
    """Return the models of a server with ``settings`` and the ``[[model]]`` tables of the file
    ``where``, and warnings. Raises: `FlagError`.
    """
    if not tables:
        return (ModelEntry(settings=settings, alone=True),), []
    for name in _NOT_BY_MODEL:
        if name in settings.given:
            flag = name.replace("_", "-")
            raise FlagError(f"--{flag}: cannot be used with [[model]] in {where}")
    entries, warnings = [], []
    for number, table in enumerate(tables, 1):
        entry, more = _entry(settings, table, f"[[model]] number {number} of {where}")
        entries.append(entry)
        warnings += more
    owners: dict[str, str] = {}
    for entry in entries:
        for name in entry.names:
            if name in owners:
                whose = "twice" if owners[name] == entry.id else f"by {owners[name]} and {entry.id}"
                raise FlagError(f"--config: the model name {name!r} is used {whose} in {where}")
            owners[name] = entry.id
    return tuple(entries), warnings


def _entry(settings: Settings, table: Any, where: str) -> tuple[ModelEntry, list[str]]:
    if not isinstance(table, Mapping):
        raise FlagError(f"--config: {where} is not a table")
    rest = dict(table)
    path = _text(rest, "path", where)
    own_id = _text(rest, "id", where) or path
    aliases, pinned = rest.pop("aliases", []), rest.pop("pinned", False)
    if own_id is None:
        raise FlagError(f"--config: {where} needs an id or a path")
    if not isinstance(aliases, list) or not all(map(_is_name, aliases)):
        raise FlagError(f"--config: aliases of {where} must be a list of strings")
    if not isinstance(pinned, bool):
        raise FlagError(f"--config: pinned of {where} must be true or false")
    if "adapter" in rest:
        rest["adapter"] = from_tables(rest["adapter"], where)
    values, warnings = values_of(MODEL_FLAGS, from_table(MODEL_FLAGS, rest, where))
    merged = dataclasses.replace(
        settings,
        **values,
        model=path or own_id,
        served_model_name=(own_id, *aliases),
        given=settings.given | values.keys() | {*_NOT_BY_MODEL},
    )
    check(merged)
    return ModelEntry(settings=merged, pinned=pinned), warnings


def _is_name(value: object) -> TypeGuard[str]:
    """Return whether ``value`` is text that fits on one line."""
    return isinstance(value, str) and bool(value.strip()) and value.isprintable()


def _text(table: dict[str, Any], key: str, where: str) -> str | None:
    value: object = table.pop(key, None)
    if value is None:
        return None
    if not _is_name(value):
        raise FlagError(f"--config: {key} of {where} must be a non-empty string")
    return value


def command_line(settings: Settings, *, of_router: bool = False) -> list[str]:
    """Return the command line for the values set in ``settings``, without secrets and sockets,
    which differ between child processes. Only that ``of_router`` names files that only a router
    reads: other processes may be on other machines, or start when a file has been removed.

    The config file itself is not passed on: a child that is started later gets the same settings as
    the others even if the file has changed.
    """
    left_out = {"config", "engine_socket", "kvstore_socket"}
    if not of_router:
        left_out |= _FILES_OF_THE_ROUTER
    return [
        word
        for flag in FLAGS
        if flag.field in settings.given and not flag.declared.secret and flag.field not in left_out
        for word in arguments(flag, getattr(settings, flag.field))
    ]


def model_changes(before: ModelEntry, after: ModelEntry) -> set[str]:
    """Return the settings whose change from ``before`` requires an engine restart."""
    names = {flag.field for flag in MODEL_FLAGS} | {*_NOT_BY_MODEL}
    return {
        name
        for name in names - {"idle_unload_s", *_OF_THE_FLEET}
        if getattr(before.settings, name) != getattr(after.settings, name)
    }


def fixed_changes(before: Settings, after: Settings) -> set[str]:
    """Return the changed settings that belong to no model: a running process keeps the old ones."""
    by_model = {flag.field for flag in MODEL_FLAGS} | {*_NOT_BY_MODEL, "fleet_memory_gb"}
    names = {flag.field for flag in FLAGS} - by_model
    return {name for name in names if getattr(before, name) != getattr(after, name)}


def overlay(settings: Settings, values: Mapping[str, Any], where: str) -> Settings:
    """Return ``settings`` with the ``values`` that `serving_options` has made at ``where``.

    Unknown values are ignored, so that a newer engine can send more. Raises: `FlagError` for
    invalid values.
    """
    flags = [flag for flag in MODEL_FLAGS if flag.field in _OF_THE_ROUTER]
    known = {name: value for name, value in values.items() if name in _OF_THE_ROUTER}
    checked, _ = values_of(flags, from_table(flags, known, where))
    return dataclasses.replace(settings, **checked)


def serving_options(settings: Settings) -> dict[str, Any]:
    """Return the settings of a model that a router needs, as far as they are set."""
    found = {
        name: getattr(settings, name)
        for name in sorted(_OF_THE_ROUTER)
        if name in settings.given and getattr(settings, name) is not None
    }
    template = chat_template_text(settings)
    if template != settings.chat_template:  # routers on other machines may not have the file
        found["chat_template"] = template
    return found


def chat_template_text(settings: Settings) -> str | None:
    """Return the chat template from the settings; if the setting names a file, its content."""
    given = settings.chat_template
    if given is None:
        return None
    try:
        is_file = Path(given).is_file()
    except OSError:  # text that is too long for a path
        return given
    return Path(given).read_text(encoding="utf-8") if is_file else given


_OF_THE_ROUTER = {
    *("chat_template", "chat_template_args", "eos_token", "pad_token", "bos_token"),
    *("tool_parser", "reasoning_parser", "fim_layout", "temperature", "top_p", "top_k", "min_p"),
    "decision_temperature",
    *("default_max_tokens", "max_prompt_tokens", "max_generation_tokens", "max_queue_size"),
    *("max_concurrent_requests",),
    *("request_timeout_s", "first_token_timeout_s", "memory_pressure_threshold"),
    "stall_timeout_s",
}
