"""The parts of the documentation that are generated: `make docs` writes them.

Each stands between two comments, ``<!-- generated: NAME -->`` and ``<!-- end -->``. The tables of
`docs/models.md` and `docs/clients.md` are not among them: they take minutes (`make zoo`,
`make clients`, `make agents`).
"""

from __future__ import annotations

import json
import re
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge, Histogram, Metric

from router.anthropic.schemas import MessagesRequest
from router.fleet.engines.engine import Engine, ModelReplicas
from router.fleet.metrics.prometheus import LoopHistogram
from router.fleet.router import Router
from router.http.app import create_app
from router.http.middleware.api_keys import ApiKeys
from router.responses.schemas import ResponsesRequest
from router.schemas.body import other_names, refusals
from router.schemas.other_servers import OtherServersFields
from router.schemas.requests import ChatRequest, CompletionRequest
from router.schemas.sampling import SamplingRequest
from shared.flags import Flag, flags_of
from shared.settings import Settings
from shared.wire import DraftCounts, DraftStats, EngineStats, StoreStats
from tests.router.scripted_engine import make_hello
from tests.router.tokens import template_table

ROOT = Path(__file__).parents[1]

_PART = re.compile(r"(<!-- generated: ([\w /-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

_REQUESTS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "fim": "/v1/fim/completions",
    "infill": "/infill",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
WIDTH = 140
"""Characters of a line."""
WITH_OWN_TABLES = ("/admin/", "/api/")
"""Paths of endpoints that are in tables written by hand, not in the generated one."""
_NOT_SAMPLING = ("model", "stream")
"""Fields of `SamplingRequest` that do not say how tokens are chosen."""


def updated(path: Path) -> str:
    """The text of ``path`` with its generated parts as they should be."""
    makers = parts()
    return _PART.sub(
        lambda found: f"{found[1]}\n{makers[found[2]]()}\n\n{found[3]}",
        path.read_text(encoding="utf-8"),
    )


def parts() -> dict[str, Callable[[], str]]:
    """What makes each generated part, by its name."""
    documents: list[dict[str, Any]] = []

    def document() -> dict[str, Any]:
        if not documents:
            documents.append(_openapi())
        return documents[0]

    fields = {
        f"fields {name}": lambda path=path: _fields(document(), path)
        for name, path in _REQUESTS.items()
    }
    return {
        "flags": _flags,
        "metrics": _metrics,
        "endpoints": lambda: _endpoints(document()),
        "templates": lambda: _table(*template_table.table()),
        "largest models": _largest_models,
        "model choices": _model_choices,
        "fields refused": _refused_fields,
        "fields renamed": _renamed_fields,
        "fields sampling": lambda: _sampling_fields(document()),
        **fields,
    }


def documents() -> list[Path]:
    """Every Markdown file of the repository."""
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


# -- flags ---------------------------------------------------------------------


def _flags() -> str:
    """A table of flags, in the order of their declaration, with a row above each group."""
    groups: dict[str, list[Flag]] = {}
    for flag in flags_of(Settings):
        groups.setdefault(flag.group, []).append(flag)
    rows: list[tuple[str, str, str]] = []
    for group, flags in groups.items():
        rows += [(f"**{group[0].upper()}{group[1:]}**", "", ""), *map(_flag, flags)]
    return _table(("flag", "default", ""), rows)


def _flag(flag: Flag) -> tuple[str, str, str]:
    name = f"`--{flag.name}`"
    if flag.kind is bool and not flag.name.startswith("no-"):
        name += f" / `--{flag.opposite}`"
    text = flag.declared.help
    if flag.kind is tuple:
        text += "; repeatable"
    if flag.choices:
        text += f" ({', '.join(f'`{choice}`' for choice in flag.choices)})"
    if flag.declared.later:
        text += " — *not available yet*"
    default = flag.shown_default
    return name, default if not default or " " in default else f"`{default}`", text


# -- metrics -------------------------------------------------------------------


def _metrics() -> str:
    with tempfile.TemporaryDirectory() as directory:
        router = _router(directory)
        for each in (vars(router.metrics) | vars(router.metrics.images)).values():
            if isinstance(each, Counter | Gauge | Histogram | LoopHistogram):
                for count in (1, 2):  # only of labels that have values there is a sample
                    with suppress(ValueError, TypeError):
                        each.labels(*["x"] * count)
        hello = make_hello("engine-0")
        model = ModelReplicas(hello, router.settings)
        engine = Engine(b"", hello, "engine-0", 1.0)
        engine.store = StoreStats()
        engine.stats = EngineStats(drafts=DraftStats(sources={"ngram": DraftCounts()}))
        model.engines.append(engine)
        router.registry.models[model.id] = model
        families = list(router.metrics.registry.collect())
        router.engine_sockets.close()
    return _table(("name", "type", "labels", ""), [_metric(family) for family in families])


def _metric(family: Metric) -> tuple[str, str, str, str]:
    own = [name for sample in family.samples for name in sample.labels if name != "le"]
    name = f"{family.name}_total" if family.type == "counter" else family.name
    labels = ", ".join(f"`{label}`" for label in dict.fromkeys(own))
    return f"`{name}`", family.type, labels, family.documentation


# -- models --------------------------------------------------------------------


def _largest_models() -> str:
    from tests import model_choices  # which imports MLX

    return _table(("memory", "largest model", "weights", "context"), model_choices.largest())


def _model_choices() -> str:
    from tests import model_choices  # which imports MLX

    bits = [f"`--kv-bits {bits}`" for bits in model_choices.KV_BITS]
    columns = ("Mac", "model", "weights", *bits, "of 10,240 at once")
    return _table(columns, model_choices.agent_rows())


# -- the API -------------------------------------------------------------------


def paths() -> list[str]:
    """The paths of all endpoints."""
    return list(_openapi()["paths"])


def _endpoints(document: dict[str, Any]) -> str:
    """The endpoints, each path with its aliases, without those that have tables of their own."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for path, operations in document["paths"].items():
        if path.startswith(WITH_OWN_TABLES):
            continue
        methods = ", ".join(method.upper() for method in operations)
        summary, *others = (operation["summary"] for operation in operations.values())
        text = "; ".join([summary, *(f"{other[0].lower()}{other[1:]}" for other in others)])
        name = path.rpartition("/")[2]
        key = _key(path, next(iter(operations.values())))
        rows.setdefault((name, methods, text, key), []).append(path)
    return _table(
        ("", "path", "", "key"),
        [
            (methods, ", ".join(f"`{path}`" for path in found), text, key)
            for (_, methods, text, key), found in rows.items()
        ],
    )


def _key(path: str, operation: dict[str, Any]) -> str:
    if not operation["security"]:
        return ""
    return "`--metrics-key`" if path in ("/metrics", "/page/feed") else "`--api-key`"


def _sampling_fields(document: dict[str, Any]) -> str:
    schema = _body(document, _REQUESTS["chat"])
    return _fields_list(schema, [name for name in _sampling_names() if name in _accepted(schema)])


def _fields(document: dict[str, Any], path: str) -> str:
    """The fields that only this endpoint has, or has otherwise, and those that it refuses."""
    schema = _body(document, path)
    common = _body(document, _REQUESTS["chat"])["properties"]
    sampling = _sampling_names()
    accepted = [
        name
        for name in _accepted(schema)
        if name not in sampling or schema["properties"][name] != common[name]
    ]
    refused = [
        name
        for name, field in schema["properties"].items()
        if field.get("description", "").startswith("Not supported")
        and name not in refusals(OtherServersFields)
    ]
    listed = ", ".join(f"`{name}`" for name in sorted(refused))
    required = schema.get("required", ())
    accepted.sort(key=lambda name: name not in required)
    others = "[those of other servers](#fields-of-other-servers)"
    listed += ", and " if listed else ""
    return f"{_fields_list(schema, accepted)}\n\nRefused by name: {listed}{others}."


def _refused_fields() -> str:
    """The fields of other servers by what to do instead, each with the values it may have."""
    advices: dict[str, list[str]] = {}
    served = refusals(OtherServersFields).keys() - refusals(ChatRequest).keys()
    assert not served, f"chats have {sorted(served)}: remove them from other_servers.py"
    for name, refusal in refusals(OtherServersFields).items():
        values = ", ".join(json.dumps(each) for each in refusal.neutral)
        told = re.sub(r"'(\S+?)'", r"`\1`", refusals(ChatRequest)[name].advice)
        told = told or "not supported"
        advices.setdefault(told, []).append(f"`{name}`" + (f" ({values})" if values else ""))
    return _table(
        ("refused, unless null or a value in parentheses", "instead"),
        [(", ".join(advices[told]), told) for told in advices],
    )


def _renamed_fields() -> str:
    """Other servers' names by ours, each with the values that mean that it is not set."""
    names: dict[str, dict[str, str]] = {}
    for kind in (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest):
        for name, other in other_names(kind).items():
            unset = ", ".join(json.dumps(each) for each in other.unset)
            if other.own in kind.__struct_fields__:
                names.setdefault(other.own, {})[name] = f"`{name}`" + (
                    f" ({unset})" if unset else ""
                )
    return _table(
        ("taken for", "unless null or a value in parentheses"),
        [(f"`{own}`", ", ".join(found.values())) for own, found in names.items()],
    )


def _fields_list(schema: dict[str, Any], names: Iterable[str]) -> str:
    """The fields by their types, in the order of the first of each."""
    required = schema.get("required", ())
    by_type: dict[str, list[str]] = {}
    for name in names:
        fields = by_type.setdefault(_type(schema["properties"][name]), [])
        fields.append(f"`{name}`{' (required)' if name in required else ''}")
    groups = (f"{', '.join(fields)}: {kind}" for kind, fields in by_type.items())
    return textwrap.fill("; ".join(groups) + ".", WIDTH, break_on_hyphens=False)


def _sampling_names() -> list[str]:
    return [name for name in SamplingRequest.__struct_fields__ if name not in _NOT_SAMPLING]


def _body(document: dict[str, Any], path: str) -> dict[str, Any]:
    content = document["paths"][path]["post"]["requestBody"]["content"]
    reference: str = content["application/json"]["schema"]["$ref"]
    found: dict[str, Any] = document["components"]["schemas"][reference.rpartition("/")[2]]
    return found


def _accepted(schema: dict[str, Any]) -> list[str]:
    return [
        name
        for name, field in schema["properties"].items()
        if not field.get("description", "").startswith(("Not supported", "Another name"))
    ]


def _type(schema: dict[str, Any]) -> str:
    """A JSON schema in words; objects are not looked into."""
    if "anyOf" in schema:
        kinds = [_type(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(each)}`" for each in schema["enum"])
    match schema.get("type"):
        case "array":
            most = f" (at most {schema['maxItems']:,})" if "maxItems" in schema else ""
            return f"list{most} of {_type(schema['items'])}"
        case "string" if "maxLength" in schema:
            return f"string (up to {schema['maxLength']:,} characters)"
        case "object" if "additionalProperties" in schema:
            return f"object of {_type(schema['additionalProperties'])}"
        case "integer" | "number" as kind:
            return f"{kind}{_range(schema)}"
        case kind:
            return str(kind or "object")


def _range(schema: dict[str, Any]) -> str:
    high = schema.get("maximum", 2**63)
    if (above := schema.get("exclusiveMinimum")) is not None:
        return f" (over {above:g}, to {high:g})"
    low = schema.get("minimum", -(2**63))
    if abs(low) >= 2**31:
        return ""
    return f" ({low:g} or more)" if high >= 2**31 - 1 else f" ({low:g} to {high:g})"


# -- a router without engines --------------------------------------------------


def _openapi() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        router = _router(directory)
        app = create_app(router, ApiKeys(Settings(api_key=("key",))))
        router.engine_sockets.close()
    found: dict[str, Any] = json.loads(app.state.openapi())
    return found


def _router(directory: str) -> Router:
    return Router(
        Settings(metrics_key="key", admin_key="key", batch_dir=Path(directory) / "batches"),
        [f"ipc://{directory}/engines"],
        "unknown",
    )


def main() -> None:
    for path in documents():
        text = updated(path)
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
