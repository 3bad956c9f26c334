"""The models of a server: each with settings of its own, from ``[[model]]`` in the TOML file.

The flags are the defaults for all models. Without ``[[model]]`` there is one, ``--model``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from shared.flags import FlagError, arguments, flags_of, from_table, values_of
from shared.settings.checks import check
from shared.settings.groups import (
    BatchingSettings,
    GenerationSettings,
    KVCacheSettings,
    ModelSettings,
    Settings,
    SpeculationSettings,
)
from shared.settings.machines import DistributedSettings

_GROUPS = (
    ModelSettings,
    KVCacheSettings,
    BatchingSettings,
    GenerationSettings,
    SpeculationSettings,
    DistributedSettings,
)
_NOT_BY_MODEL = ("model", "served_model_name")
_FURTHER = (
    *("engines", "memory_pressure_threshold", "stall_timeout_s", "max_concurrent_requests"),
    *("ray_label", "max_engines", "scale_up_queue", "scale_down_s"),
)
_OF_THE_FLEET = ("engines", "max_engines", "scale_up_queue", "scale_down_s")
"""Of what decides how many engines there are: they need no restart."""
FLAGS = flags_of(Settings)
MODEL_FLAGS = [
    flag
    for flag in FLAGS
    if flag.field in _FURTHER
    or (flag.group in {group.GROUP for group in _GROUPS} and flag.field not in _NOT_BY_MODEL)
]
"""The flags that a ``[[model]]`` may set for itself."""
CONFIG_VARIABLE = next(flag.variable for flag in FLAGS if flag.field == "config")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One model that is served."""

    settings: Settings
    """All settings, as they are for this model."""
    pinned: bool = False  # it is never unloaded to make room for others
    alone: bool = False  # it comes from --model, and is the only one

    @property
    def names(self) -> tuple[str, ...]:
        """What the API calls the model, its own name first."""
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
    """Return the models of a server with ``settings`` and these ``[[model]]`` tables of the file
    ``where``, and warnings. Raises: `FlagError`."""
    if not tables:
        return (ModelEntry(settings=settings, alone=True),), []
    for name in _NOT_BY_MODEL:
        if name in settings.given:
            flag = name.replace("_", "-")
            raise FlagError(f"--{flag}: makes no sense beside [[model]] in {where}")
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
        raise FlagError(f"--config: {where} has neither id nor path")
    if not isinstance(aliases, list) or not all(map(_is_name, aliases)):
        raise FlagError(f"--config: aliases of {where} are not a list of strings")
    if not isinstance(pinned, bool):
        raise FlagError(f"--config: pinned of {where} is neither true nor false")
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
    """Return whether ``value`` is text that can be shown in one line."""
    return isinstance(value, str) and bool(value.strip()) and value.isprintable()


def _text(table: dict[str, Any], key: str, where: str) -> str | None:
    value: object = table.pop(key, None)
    if value is None:
        return None
    if not _is_name(value):
        raise FlagError(f"--config: {key} of {where} is not a string with text")
    return value


def command_line(settings: Settings) -> list[str]:
    """Return the words of a command line with what is given in ``settings``, but for secrets and
    sockets, which are not the same for all children.

    The file is not among them: a child that is started later has the settings of the others.
    """
    left_out = ("config", "engine_socket", "kvstore_socket")
    return [
        word
        for flag in FLAGS
        if flag.field in settings.given and not flag.declared.secret and flag.field not in left_out
        for word in arguments(flag, getattr(settings, flag.field))
    ]


def model_changes(before: ModelEntry, after: ModelEntry) -> set[str]:
    """Return the settings for which an engine of ``before`` has to be restarted."""
    names = {flag.field for flag in MODEL_FLAGS} | {*_NOT_BY_MODEL}
    return {
        name
        for name in names - {"idle_unload_s", *_OF_THE_FLEET}
        if getattr(before.settings, name) != getattr(after.settings, name)
    }


def fixed_changes(before: Settings, after: Settings) -> set[str]:
    """Return the settings that differ and are no model's: processes that run keep theirs."""
    by_model = {flag.field for flag in MODEL_FLAGS} | {*_NOT_BY_MODEL, "fleet_memory_gb"}
    names = {flag.field for flag in FLAGS} - by_model
    return {name for name in names if getattr(before, name) != getattr(after, name)}


def overlay(settings: Settings, values: Mapping[str, Any], where: str) -> Settings:
    """Return ``settings`` with the ``values`` that `serving_options` has made at ``where``.

    Those that are not known here are left out, so that a newer engine can have more. Raises:
    `FlagError` for bad values.
    """
    flags = [flag for flag in MODEL_FLAGS if flag.field in _OF_THE_ROUTER]
    known = {name: value for name, value in values.items() if name in _OF_THE_ROUTER}
    checked, _ = values_of(flags, from_table(flags, known, where))
    return dataclasses.replace(settings, **checked)


def serving_options(settings: Settings) -> dict[str, Any]:
    """Return what a router has to know of a model's settings, as far as it is given."""
    found = {
        name: getattr(settings, name)
        for name in sorted(_OF_THE_ROUTER)
        if name in settings.given and getattr(settings, name) is not None
    }
    template = chat_template_text(settings)
    if template != settings.chat_template:  # routers elsewhere may not have the file
        found["chat_template"] = template
    return found


def chat_template_text(settings: Settings) -> str | None:
    """Return the chat template that is set, read from its file if it is the name of one."""
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
    *("tool_parser", "reasoning_parser", "temperature", "top_p", "top_k", "min_p"),
    *("default_max_tokens", "max_prompt_tokens", "max_generation_tokens", "max_queue_size"),
    *("max_concurrent_requests",),
    *("request_timeout_s", "first_token_timeout_s", "memory_pressure_threshold"),
    "stall_timeout_s",
}
