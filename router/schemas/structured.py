"""Fields that constrain an answer with a grammar: OpenAI's `response_format`, vLLM's
`structured_outputs`, and its older `guided_*`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from router.errors import InvalidRequest, NotSupported
from shared.wire import MAX_GRAMMAR_BYTES, Grammar

MAX_CHOICES = 4096
MAX_INPUT_GRAMMAR_BYTES = 32 * 1024
"""Size limit for the grammar of a tool's input, which grows several times in the
grammar of calls."""

_UNSUPPORTED = (
    "structural_tag",
    "whitespace_pattern",
    "disable_any_whitespace",
    "disable_additional_properties",
)

Schema = dict[str, Any]
SchemaOrText = Schema | str
"""A JSON schema, or its JSON text."""
Choices = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)]


class JsonSchemaFormat(Struct, frozen=True, kw_only=True):
    """A schema that the answer must match, whether or not ``strict`` is set."""

    schema: Schema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema: Annotated[
        Schema | None, Meta(description="A schema for 'json_object', as llama.cpp takes it.")
    ] = None

    def grammar(self) -> Grammar | None:
        """Return the grammar of the answer. Raises `InvalidRequest`."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            if self.schema:
                return json_schema_grammar(self.schema, "response_format.schema")
            return json_object_grammar("response_format")
        if self.json_schema is None:
            raise InvalidRequest(
                "'response_format' of type 'json_schema' requires 'json_schema'.",
                param="response_format.json_schema",
            )
        return json_schema_grammar(self.json_schema.schema, "response_format.json_schema.schema")


class StructuredOutputs(Struct, frozen=True, kw_only=True):
    json: SchemaOrText | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None

    def grammars(self) -> list[Grammar]:
        """Return the grammars of all fields that are set. Raises `InvalidRequest`."""
        for unsupported in _UNSUPPORTED:
            if getattr(self, unsupported):
                name = f"structured_outputs.{unsupported}"
                raise NotSupported(f"'{name}' is not supported.", param=name)
        grammars = _given_grammars(
            "structured_outputs.", self.json, self.regex, self.choice, self.grammar
        )
        if self.json_object:
            grammars.append(json_object_grammar("structured_outputs.json_object"))
        if not grammars:
            raise InvalidRequest(
                "'structured_outputs' requires one of 'json', 'regex', 'choice', 'grammar' and "
                "'json_object'.",
                param="structured_outputs",
            )
        return grammars


class StructuredOutputFields(Struct, frozen=True, kw_only=True):
    """The fields of a request that constrain its answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the answer. Raises `InvalidRequest` if a field is invalid, or if two
        differ: clients send one constraint under the names of several servers."""
        grammars = _given_grammars(
            "guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        )
        if self.structured_outputs is not None:
            grammars = [*self.structured_outputs.grammars(), *grammars]
        if self.response_format is not None:
            own = self.response_format.grammar()
            grammars = [own, *grammars] if own is not None else grammars
        others = [each for each in grammars[1:] if _meaning(each) != _meaning(grammars[0])]
        if others:
            names = " and ".join(f"'{grammar.param}'" for grammar in grammars)
            raise InvalidRequest(
                f"{names} constrain the answer in different ways; only one of them may be set.",
                param=others[0].param,
            )
        return grammars[0] if grammars else None


def _meaning(grammar: Grammar) -> tuple[str, Any]:
    is_json = grammar.kind == "json_schema"
    return grammar.kind, msgspec.json.decode(grammar.source) if is_json else grammar.source


def json_schema_grammar(schema: SchemaOrText, param: str) -> Grammar:
    """Return the grammar of JSON that is valid under ``schema``. ``param`` is the field named in
    errors. Raises `InvalidRequest`."""
    if isinstance(schema, str):
        check_grammar_size(len(schema), param)
        try:
            msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"'{param}' is not valid JSON: {error}", param=param) from None
        return _grammar("json_schema", schema, param)
    try:
        text = msgspec.json.encode(schema).decode()
    except RecursionError:  # this is a few calls deeper than the decoding of the body was
        raise InvalidRequest(f"'{param}' is nested too deeply.", param=param) from None
    return _grammar("json_schema", text, param)


def json_object_grammar(param: str) -> Grammar:
    """Return the grammar of any JSON object."""
    return json_schema_grammar({"type": "object"}, param)


def regex_grammar(pattern: str, param: str) -> Grammar:
    """Return the grammar of texts that fully match ``pattern``. Raises `InvalidRequest`."""
    return _grammar("regex", pattern, param)


def lark_grammar(text: str, param: str) -> Grammar:
    """Return the Lark grammar ``text``, in llguidance's dialect. Raises `InvalidRequest`."""
    return _grammar("lark", text, param)


def choice_grammar(texts: list[str], param: str) -> Grammar:
    """Return the grammar of answers equal to one of ``texts``. Raises `InvalidRequest`."""
    # Lark's string syntax is JSON's.
    quoted = (json.dumps(text, ensure_ascii=False) for text in texts)
    return lark_grammar("start: " + " | ".join(quoted), param)


def _given_grammars(
    prefix: str,
    schema: SchemaOrText | None,
    pattern: str | None,
    texts: list[str] | None,
    text: str | None,
) -> list[Grammar]:
    grammars = []
    if schema is not None:
        grammars.append(json_schema_grammar(schema, f"{prefix}json"))
    if pattern is not None:
        grammars.append(regex_grammar(pattern, f"{prefix}regex"))
    if texts is not None:
        grammars.append(choice_grammar(texts, f"{prefix}choice"))
    if text is not None:
        grammars.append(lark_grammar(text, f"{prefix}grammar"))
    return grammars


def _grammar(kind: Literal["json_schema", "regex", "lark"], source: str, param: str) -> Grammar:
    check_grammar_size(len(source.encode()), param)
    return Grammar(kind=kind, source=source, param=param)


def check_grammar_size(size: int, param: str, limit: int = MAX_GRAMMAR_BYTES) -> None:
    """Raise `InvalidRequest` if a grammar of ``size`` bytes is too large; ``param`` is the field
    named in the error."""
    if size > limit:
        raise InvalidRequest(
            f"'{param}' has {size} bytes; the limit is {limit}.",
            param=param,
            code="request_too_large",
        )
