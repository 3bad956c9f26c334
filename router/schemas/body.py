"""Request bodies of any API, decoded and checked.

Every field that is read has a type and a range, so that a decoded body is valid in itself. Checks
that depend on the model are in `router.generation.sampling`.
"""

from __future__ import annotations

import re
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
    """Return ``request``. Raises `NotSupported` for fields that would change the meaning of the
    answer, and `InvalidRequest` for fields that contradict each other."""
    for name, refusal in refusals(type(request)).items():
        value = getattr(request, refusal.attribute)
        if value is None or any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in refusal.neutral
        ):
            continue
        reason = f"'{name}' is not supported."
        raise NotSupported(f"{reason} {refusal.advice}".rstrip(), param=name)
    request.check()
    return request


@cache
def refusals(body_type: type[Struct]) -> dict[str, FieldRefusal]:
    """Return the fields of ``body_type`` that are rejected, by their names in JSON.

    Advice that names a field that ``body_type`` does not accept is left out.
    """
    found: dict[str, FieldRefusal] = {}
    accepted = set()
    for field in msgspec.structs.fields(body_type):
        refusal = _refusal(field.type)
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


def _refusal(annotation: Any) -> FieldRefusal | None:
    for meta in get_args(annotation)[1:]:
        if isinstance(meta, Meta) and meta.extra and "refusal" in meta.extra:
            refusal: FieldRefusal = meta.extra["refusal"]
            return refusal
    return None
