"""The OpenAPI document (3.1), generated from the table of operations and their types.

Sources: OpenAPI Specification 3.1.1; msgspec's JSON schemas, in the 2020-12 dialect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from router.api.operations import Operation
from router.errors import ApiError, TooManyRequests, Unauthorized, Unavailable
from router.schemas.body import RequestBody, other_names, refusals

_Json = dict[str, Any]

_REF = "#/components/schemas/{name}"
_REQUEST_ID = {
    "description": "The id of this request in the server's log: the client's own, if it sent one.",
    "schema": {"type": "string"},
}
_RETRY_AFTER = {
    "description": "Seconds after which to retry.",
    "schema": {"type": "integer", "minimum": 1},
}
_AUTHENTICATE = {"description": "How to authenticate.", "schema": {"type": "string"}}


def document(
    operations: Sequence[Operation],
    *,
    version: str,
    server_url: str,
    keys_needed: bool,
    metrics_key_needed: bool,
) -> bytes:
    """Return the document as JSON. ``server_url`` is the base of the paths of ``operations``."""
    needed = {
        "open": None,
        "key": keys_needed,
        "metrics key": metrics_key_needed,
        "admin key": True,
    }
    types = list(dict.fromkeys(_types(operations)))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    references = dict(zip(types, schemas, strict=True))
    for kind in types:
        if isinstance(kind, type) and issubclass(kind, RequestBody):
            name = references[kind]["$ref"].rpartition("/")[2]
            _mark_unsupported(kind, components[name]["properties"])
    paths: dict[str, _Json] = {}
    for operation in operations:
        described = _operation(operation, references)
        described["security"] = _security(needed[operation.access])
        paths.setdefault(operation.path_template, {})[operation.method.lower()] = described
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "mlx-lm-server",
                "version": version,
                "summary": "LLM serving on MLX, behind the APIs of OpenAI, Anthropic and Ollama.",
                "license": {"name": "MIT", "identifier": "MIT"},
            },
            "servers": [{"url": server_url}],
            "tags": [{"name": tag} for tag in dict.fromkeys(each.tag for each in operations)],
            "paths": paths,
            "components": {
                "schemas": _normalized(components),
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
        }
    )


def _types(operations: Sequence[Operation]) -> Iterator[Any]:
    for each in operations:
        kinds = (each.body_type, each.response_type, each.event_type, each.error_type)
        yield from (kind for kind in kinds if kind is not None)


def _operation(operation: Operation, references: dict[Any, _Json]) -> _Json:
    words = operation.path_template.replace("{", "").replace("}", "").strip("/")
    described: _Json = {
        "operationId": f"{operation.method.lower()}_{words}".replace("/", "_"),
        "summary": operation.summary,
        "tags": [operation.tag],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _path_parameters(operation.path_template)
        ]
        + [
            {"name": name, "in": "query", "schema": schema}
            for name, schema in operation.query.items()
        ],
        "responses": _responses(operation, references),
    }
    if operation.body_type is not None:
        content: _Json = {"schema": references[operation.body_type]}
        if operation.example is not None:
            content["example"] = operation.example
        described["requestBody"] = {
            "required": True,
            "content": {operation.body_media_type: content},
        }
    return described


def _path_parameters(template: str) -> list[str]:
    return [part[1:-1] for part in template.split("/") if part.startswith("{")]


def _security(key_needed: bool | None) -> list[_Json]:
    """Return alternative authentication headers. An empty entry means that none is required."""
    if key_needed is None:
        return []
    known: list[_Json] = [{"bearer": []}, {"x-api-key": []}]
    return known if key_needed else [{}, *known]


def _responses(operation: Operation, references: dict[Any, _Json]) -> _Json:
    responses: _Json = {}
    for error in operation.all_errors:
        responses[str(error.status)] = {
            "description": error.__doc__ or "",
            "headers": {"x-request-id": _REQUEST_ID, **_error_headers(error)},
            "content": {"application/json": {"schema": references[operation.error_type]}},
        }
    headers = {
        name: {"description": says, "schema": {"type": "string"}}
        for name, says in operation.headers.items()
    }
    for status in operation.statuses:
        responses[str(status)] = {
            "description": "The response." if status == 200 else "The same response, if not ready.",
            "headers": {"x-request-id": _REQUEST_ID, **headers},
            "content": _content(operation, references),
        }
    return dict(sorted(responses.items()))


def _error_headers(error: type[ApiError]) -> _Json:
    if issubclass(error, Unauthorized):
        return {"www-authenticate": _AUTHENTICATE}
    if issubclass(error, TooManyRequests | Unavailable):
        return {"retry-after": _RETRY_AFTER}
    return {}


def _content(operation: Operation, references: dict[Any, _Json]) -> _Json:
    if operation.response_type is None:
        return {operation.media_type: {"schema": {"type": "string"}}}
    content: _Json = {operation.media_type: {"schema": references[operation.response_type]}}
    if operation.event_type is not None:
        kinds = [references[operation.event_type], references[operation.error_type]]
        schema: _Json = {"anyOf": kinds, "description": "One line of a stream."}
        if operation.stream_media_type == "text/event-stream":
            schema = _event({"anyOf": kinds}, operation.stream_terminator)
        content[operation.stream_media_type] = {"schema": schema}
    return content


def _event(content: _Json, last_data: str | None) -> _Json:
    """Return the schema of one server-sent event, in the form of OpenAPI 3.2."""
    data: _Json = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": content,
    }
    if last_data is not None:
        data = {"anyOf": [data, {"const": last_data}]}
    return {
        "type": "object",
        "description": "One event of a stream.",
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["data"],
    }


def _mark_unsupported(kind: type[RequestBody], properties: _Json) -> None:
    """Restrict the schemas of unsupported fields to their neutral values, and name the fields that
    are another server's names."""
    for name, refusal in refusals(kind).items():
        description = f"Not supported: other values are rejected. {refusal.advice}".rstrip()
        properties[name] = {"enum": [None, *refusal.neutral], "description": description}
    for name, other in other_names(kind).items():
        if other.own:
            properties[name] |= {"description": f"Another name of `{other.own}`."}


def _normalized(value: Any) -> Any:
    """Return ``value`` with descriptions in Markdown and patterns in ECMAScript syntax."""
    if isinstance(value, list):
        return [_normalized(each) for each in value]
    if not isinstance(value, dict):
        return value
    tidied = {name: _normalized(each) for name, each in value.items()}
    if isinstance(description := tidied.get("description"), str):
        tidied["description"] = description.replace("``", "`")
    if isinstance(pattern := tidied.get("pattern"), str):
        tidied["pattern"] = pattern.replace("\\Z", "$")
    return tidied
