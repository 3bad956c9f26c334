"""Adapters in the flags and in the ``[[model]]`` tables of a configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.flags import FlagError
from shared.settings import Settings, adapters_of, parse, parse_models
from shared.settings.models import ModelEntry, model_entries

SQL = {"name": "sql", "path": "/adapters/sql"}


def entry(adapter: object, **more: object) -> ModelEntry:
    table: dict[str, Any] = {"id": "qwen", "path": "org/model", "adapter": adapter, **more}
    (found,), _ = model_entries(Settings(), [table], "models.toml")
    return found


def test_tables_of_a_model_name_its_adapters() -> None:
    found = entry([SQL, {"name": "chat", "path": "/a=b"}], **{"max-adapters": 1})
    assert found.settings.max_adapters == 1
    expected = {"sql": Path("/adapters/sql"), "chat": Path("/a=b")}
    assert adapters_of(found.settings) == expected
    assert adapters_of(parse(found.arguments(), {}, "engine")) == expected  # as an engine has them


def test_adapters_in_a_file_belong_to_the_model_above_them(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        '[[model]]\nid = "one"\n[[model.adapter]]\nname = "sql"\npath = "/sql"\n'
        '[[model]]\nid = "two"\nadapter = ["own=/own"]\n[[model]]\nid = "three"\n'
    )
    _, entries = parse_models(["--config", str(file)], {}, "prog")
    found = {one.id: list(adapters_of(one.settings)) for one in entries}
    assert found == {"one": ["sql"], "two": ["own"], "three": []}


@pytest.mark.parametrize(
    "adapter", [SQL, "sql=/sql", [{"name": "sql"}], [SQL | {"rank": 4}], [SQL | {"path": 5}], [5]]
)
def test_what_is_no_list_of_tables_with_name_and_path_is_refused(adapter: object) -> None:
    with pytest.raises(FlagError, match=r"of models\.toml is not a"):
        entry(adapter)


@pytest.mark.parametrize(
    ("name", "why"), [("a:b", "is not NAME=DIRECTORY"), ("sql", "the name sql is used twice")]
)
def test_names_of_adapters_are_checked(name: str, why: str) -> None:
    with pytest.raises(FlagError, match=why):
        adapters_of(entry([SQL, SQL | {"name": name}]).settings)
