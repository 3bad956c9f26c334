"""Secret settings, passed from the supervisor to its router.

Every user of a machine can read a process's arguments, but only the owner can read its environment.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from shared.flags import flags_of
from shared.settings.groups import Settings

SECRETS_VARIABLE = "_MLX_LM_SERVER_SECRETS"

_FLAGS = [flag for flag in flags_of(Settings) if flag.declared.secret]
SECRET_VARIABLES = frozenset(
    {SECRETS_VARIABLE}
    | {name for flag in _FLAGS for name in (flag.variable, *flag.declared.variables)}
)
"""The environment variables that have secrets."""


def secrets_of(settings: Settings) -> str:
    """Return the secrets of ``settings``, as a value of `SECRETS_VARIABLE`."""
    return json.dumps({flag.field: getattr(settings, flag.field) for flag in _FLAGS})


def with_secrets(settings: Settings, encoded: str) -> Settings:
    """Return ``settings`` with the secrets that `secrets_of` has ``encoded``."""
    found = json.loads(encoded)
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
    }
    return dataclasses.replace(settings, **values)
