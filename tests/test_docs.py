"""The documentation: its generated parts, its links, and that it names every field."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

import mlx_lm
import msgspec
import pytest

from bench.engine import step
from bench.peers import front
from router.anthropic.schemas import MessagesRequest
from router.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from router.responses.schemas import ResponsesRequest
from router.schemas.body import RequestBody, other_names, refusals
from router.schemas.requests import ChatRequest, CompletionRequest
from services.commands.bench import kv, options
from shared.flags import flags_of
from shared.settings import Settings, parse_models
from tests import generated_docs
from tests.generated_docs import ROOT

DOCUMENTS = generated_docs.documents()
MEASURED = ("benchmarks.md", "clients.md", "comparison.md", "metal.md", "models.md")
"""Pages about other programs and runs of commands, which have flags of their own."""
FOR_CONTRIBUTORS = [
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    *ROOT.glob("docs/design/*.md"),
]
_CODE = re.compile(r"^```[\s\S]*?^```$|^    .*$|`[^`\n]*`", re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_GENERATED = re.compile(r"<!-- generated: .*?<!-- end -->", re.DOTALL)

OF_COMMANDS = set(
    "--addr --env --follow --force --help --help-all --in-order --json --key-variable --name "
    "--no-history --once --questions --serve --undo --url --wait --window".split()
)
"""Flags of commands that are no settings of the server."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_generated_parts_are_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == generated_docs.updated(path), "run `make docs`"


def test_every_generated_part_is_in_a_document() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    for name in generated_docs.parts():
        assert texts.count(f"<!-- generated: {name} -->") == 1, name


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_relative_links_lead_somewhere(path: Path) -> None:
    for link in _LINK.findall(_CODE.sub("", path.read_text(encoding="utf-8"))):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{link} in {name_of(path)}"
        if anchor:
            assert anchor in anchors(target), f"{link} in {name_of(path)}"


def anchors(path: Path) -> set[str]:
    """The anchors of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize(
    "kind", [ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest]
)
def test_every_field_of_a_request_is_explained(kind: type[RequestBody]) -> None:
    """By hand: what is generated names types and ranges only."""
    others = {name for name, other in other_names(kind).items() if other.own}
    assert not fields_of(kind) - set(refusals(kind)) - others - explained("api.md")


@pytest.mark.parametrize("kind", [OllamaChatRequest, OllamaGenerateRequest, OllamaOptions])
def test_every_field_of_ollamas_api_is_explained(kind: type[msgspec.Struct]) -> None:
    assert not fields_of(kind) - explained("ollama.md")


def test_every_endpoint_that_is_not_generated_is_in_a_table_by_hand() -> None:
    pages = {"/admin/": ("api.md", "adapters.md"), "/api/": ("ollama.md",)}
    assert tuple(pages) == generated_docs.WITH_OWN_TABLES
    for prefix, names in pages.items():
        texts = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in names]
        cells = "".join(re.findall(r"^\| (`.*?) \|", "".join(texts), re.MULTILINE))
        listed = set(re.findall(r"/[\w/{}-]+", cells))
        served = {path for path in generated_docs.paths() if path.startswith(prefix)}
        assert served and served <= listed


def test_the_picture_of_the_readme_shows_the_tables_figures() -> None:
    drawn = front.draw(front.TABLES.read_text(encoding="utf-8"))
    assert drawn == front.PICTURE.read_text(encoding="utf-8"), "python -m bench.peers.front"


def fields_of(kind: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(kind)}


def explained(page: str) -> set[str]:
    """Return the names that stand in code in a page, outside of what is generated."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = re.findall(r"`([\w.]+)", _GENERATED.sub("", text))
    return {part for name in named for part in name.split(".")}


def test_files_that_the_pages_name_exist() -> None:
    """Paths of code such as `router/http/app.py`; in the pages for contributors also folders."""
    for path in DOCUMENTS:
        last = r"(?:\w+\.py)?" if path in FOR_CONTRIBUTORS else r"\w+\.py"
        for named in re.findall(rf"`((?:\w+/)+{last})[`:]", path.read_text(encoding="utf-8")):
            assert (ROOT / named).exists(), f"{named} in {name_of(path)}"


def test_functions_on_the_path_of_a_request_exist() -> None:
    steps = re.findall(
        r"`(\w[\w/]+\.py)`,\s+`([\w.]+)`", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    )
    assert len(steps) >= 14
    for file, name in steps:
        found: Any = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        for part in name.split("."):
            named = {each.name: each for each in found.body if hasattr(each, "name")}
            assert part in named, f"{file} has no {name}"
            found = named[part]


def test_classes_that_the_pages_name_exist() -> None:
    """Ours, and mlx-lm's."""
    packages = ("services", "router", "engine", "kvstore", "shared")
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    files += [Path(mlx_lm.__file__).parent / name for name in ("generate.py", "models/cache.py")]
    known = set(re.findall(r"\w+", "".join(file.read_text(encoding="utf-8") for file in files)))
    for path in FOR_CONTRIBUTORS:
        named = re.findall(r"`([A-Z][a-z]+[A-Z]\w*)`", path.read_text(encoding="utf-8"))
        assert not set(named) - known, name_of(path)


def flags_of_bench() -> set[str]:
    parsers = (options.make_parser(), step.make_parser(), kv.make_parser())
    return {flag for each in parsers for flag in re.findall(r"--[\w-]+", each.format_help())}


def test_flags_that_the_pages_name_exist() -> None:
    known = {f"--{name}" for flag in flags_of(Settings) for name in (flag.name, flag.opposite)}
    known |= OF_COMMANDS | flags_of_bench()
    for path in (ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").rglob("*.md")):
        if path.name not in MEASURED:
            named = set(re.findall(r"`(--[\w-]+)", path.read_text(encoding="utf-8")))
            assert not named - known, name_of(path)


def test_metrics_that_name_api_keys_are_those_left_out_without_a_key() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| \w+ \| (.*?) \|",
        (ROOT / "docs/metrics.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    named = {name for name, labels in rows if "`key`" in labels}
    assert named and all(name.startswith("mlx_lm_server_key_") for name in named)


def test_the_file_with_several_models_is_valid(tmp_path: Path) -> None:
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    section = text.split("## Several models")[1]
    block = re.search(r"\n((?:    .*\n|\n)+)", section)
    assert block is not None
    file = tmp_path / "server.toml"
    file.write_text(textwrap.dedent(block[1]))
    settings, (small, large) = parse_models(["--config", str(file)], {}, "prog")
    assert settings.fleet_memory_gb == 48
    assert (small.names, small.pinned) == (("small", "gpt-4o-mini"), True)
    assert small.settings.temperature == 0.7
    assert (large.settings.temperature, large.settings.engines) == (0.2, 2)
    assert (large.settings.memory_gb, large.settings.idle_unload_s) == (20, 600)
