"""Request bodies of any API, decoded and checked.

Every field that is read has a type and a range, so that a decoded body is valid in itself. Checks
that depend on the model are in `router.generation.sampling`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from router.errors import InvalidRequest, NotSupported
from router.schemas.validation import validation_error

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


_NAMED_FIELD = re.compile(r"'(\w+)'")


@dataclass(frozen=True, eq=False)
class FieldRefusal:
    """How a field is rejected.

    No two are equal: `Annotated` would take one for the other if their values are (1 and True).
    """

    neutral: tuple[Any, ...]
    """The values besides null that are accepted because they have no effect. True and 1 are
    different."""
    advice: str
    """A sentence of the error that says what to do instead. May be empty."""
    attribute: str = ""
    """The name of the field in the struct."""


def refused(*neutral: Any, advice: str = "") -> Meta:
    """Return the annotation of a field, of type ``Any``, that is rejected by name unless its value
    is null or one of ``neutral``."""
    return Meta(extra={"refusal": FieldRefusal(neutral, advice)})


@dataclass(frozen=True, eq=False)
class OtherName:
    """How a field of another server is taken."""

    own: str
    """Our name of the field; empty if it is the field itself."""
    unset: tuple[Any, ...]
    """The values that mean the same as null."""


def other_name(own: str, *unset: Any) -> Meta:
    """Return the annotation of a field that is another server's name of ``own``. Its values
    ``unset`` mean that it is not set."""
    return Meta(extra={"other_name": OtherName(own, unset)})


def unless(*unset: Any) -> Meta:
    """Return the annotation of a field whose values ``unset`` mean that it is not set."""
    return other_name("", *unset)


class RequestBody(Struct, frozen=True, kw_only=True):
    """A body of any API. Unknown fields are ignored."""

    any_media_type: ClassVar[bool] = False  # whether JSON may be sent with another media type
    may_have_images: ClassVar[bool] = False

    @property
    def image_chars(self) -> int:
        """The number of characters of the images in the body."""
        return 0

    def check(self) -> None:
        """Raise `InvalidRequest` for fields that contradict each other."""

    @property
    def left_out_tools(self) -> list[str]:
        """The types of tools that this server cannot run and does not offer to the model."""
        return []

    @property
    def left_out_items(self) -> list[str]:
        """The types of items of the conversation that became text, since this server has no other
        use for them. May run on any thread."""
        return []


_Body = TypeVar("_Body", bound=RequestBody)


def parse_body(body: bytes, body_type: type[_Body]) -> _Body:
    """Return the request in ``body``. Raises `InvalidRequest` with the name of the field."""
    try:
        request = msgspec.json.decode(body, type=body_type)
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.", code="invalid_json") from None
    return validated(request)


def validated(request: _Body) -> _Body:
    """Return ``request`` with our names of its fields. Raises `NotSupported` for fields that would
    change the meaning of the answer, and `InvalidRequest` for fields that contradict each other."""
    request = _with_own_names(request)
    for name, refusal in refusals(type(request)).items():
        value = getattr(request, refusal.attribute)
        if value is None or _is_one_of(value, refusal.neutral):
            continue
        reason = f"'{name}' is not supported."
        raise NotSupported(f"{reason} {refusal.advice}".rstrip(), param=name)
    request.check()
    return request


def _is_one_of(value: Any, values: Iterable[Any]) -> bool:
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in values
    )


def _with_own_names(request: _Body) -> _Body:
    changes: dict[str, Any] = {}
    for name, other in other_names(type(request)).items():
        value = getattr(request, name)
        if value is None:
            continue
        if _is_one_of(value, other.unset):
            changes[name] = None
        elif other.own and hasattr(request, other.own):
            own = changes.get(other.own, getattr(request, other.own))
            if own is not None and own != value:
                raise InvalidRequest(
                    f"'{name}' and '{other.own}' are the same field, and differ.", param=name
                )
            changes |= {other.own: value, name: None}
    return msgspec.structs.replace(request, **changes) if changes else request


@cache
def other_names(body_type: type[Struct]) -> dict[str, OtherName]:
    """Return the fields of ``body_type`` that have another name or values that mean null, those
    that are no other names first."""
    found = {
        field.name: other
        for field in msgspec.structs.fields(body_type)
        if (other := _extra(field.type, "other_name")) is not None
    }
    return dict(sorted(found.items(), key=lambda each: bool(each[1].own)))


@cache
def refusals(body_type: type[Struct]) -> dict[str, FieldRefusal]:
    """Return the fields of ``body_type`` that are rejected, by their names in JSON.

    Advice that names a field that ``body_type`` does not accept is left out.
    """
    found: dict[str, FieldRefusal] = {}
    accepted = set()
    for field in msgspec.structs.fields(body_type):
        refusal: FieldRefusal | None = _extra(field.type, "refusal")
        if refusal is None:
            accepted.add(field.encode_name)
        else:
            found[field.encode_name] = replace(refusal, attribute=field.name)
    return {
        name: refusal
        if accepted.issuperset(_NAMED_FIELD.findall(refusal.advice))
        else replace(refusal, advice="")
        for name, refusal in found.items()
    }


def _extra(annotation: Any, key: str) -> Any:
    for meta in get_args(annotation)[1:]:
        if isinstance(meta, Meta) and meta.extra and key in meta.extra:
            return meta.extra[key]
    return None
