"""Declarations of flags, and the flags derived from them."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

ENVIRONMENT_PREFIX = "MLX_LM_SERVER_"


class FlagError(Exception):
    """An invalid flag, variable or key; the message is one line for the user."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlagDeclaration:
    """The declaration of a flag, except its name, type and default."""

    help: str
    at_least: float | None = None
    more_than: float | None = None
    at_most: float | None = None
    # Environment variables read in addition to the flag's own. Other programs use them too, so it
    # is no error if only they are set and the feature is missing.
    variables: tuple[str, ...] = ()
    later: str | None = None  # the missing feature: only the default is accepted
    ignored: str | None = None  # the warning if a flag without effect is set
    secret: bool = False  # never shown
    word: str | None = None  # represents None
    existing_file: bool = False
    split: bool = True  # whether commas separate list items in an environment variable
    shown_default: str | None = None


def flag(default: object, help: str, **declaration: Any) -> Any:
    """Return a dataclass field for the flag of the same name.

    ``declaration`` has the fields of `FlagDeclaration`. A callable ``default`` is called for
    each new instance.
    """
    declared = FlagDeclaration(help=help, **declaration)
    options: dict[str, Any] = {"metadata": {"flag": declared}, "repr": not declared.secret}
    if callable(default):
        return dataclasses.field(default_factory=default, **options)
    return dataclasses.field(default=default, **options)


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag, ready to be read."""

    field: str
    kind: Any  # its type, without None
    choices: tuple[Any, ...]  # empty: any value of `kind`
    default: Any
    group: str
    declared: FlagDeclaration

    @property
    def name(self) -> str:
        return dashed(self.field)

    @property
    def opposite(self) -> str:
        """The name of the flag that negates a boolean."""
        return self.name.removeprefix("no-") if self.name.startswith("no-") else f"no-{self.name}"

    @property
    def variable(self) -> str:
        return variable(self.name)

    @property
    def shown_default(self) -> str:
        """The default, worded for the user."""
        if self.declared.shown_default is not None:
            return self.declared.shown_default
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if self.default in (None, (), {}, ""):
            return self.declared.word or "none"
        return str(self.default)


def flags_of(cls: type[Any]) -> list[Flag]:
    """Return the flags of the dataclass ``cls``, in order.

    Each base of ``cls`` is a dataclass of flags, with the title of the group as ``GROUP``.
    """
    hints = get_type_hints(cls)
    found = []
    for group in cls.__bases__:
        title = vars(group)["GROUP"]
        for field in dataclasses.fields(group):
            default: Any = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            kind, choices = _kind_and_choices(hints[field.name])
            declared = field.metadata["flag"]
            found.append(Flag(field.name, kind, choices, default, title, declared))
    return found


def variable(name: str) -> str:
    """Return the environment variable of the flag ``name`` (without leading dashes)."""
    return ENVIRONMENT_PREFIX + name.replace("-", "_").upper()


def dashed(field: str) -> str:
    return field.replace("_", "-")


def _kind_and_choices(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the plain type of an annotation, and the choices of a `Literal`."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal:
        return type(get_args(hint)[0]), get_args(hint)
    return get_origin(hint) or hint, ()
