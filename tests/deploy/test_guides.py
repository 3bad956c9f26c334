"""The commands of docs/deploy/: what can be tried without Docker, a cluster or a Mac."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from services.commands import cli
from shared.settings import parse_models
from tests.deploy import test_chart as chart

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs" / "deploy").glob("*.md"))
PLACEHOLDERS = {"MODEL": "demo", "SERVER": "10.0.0.1", "VERSION": "1.2.3"}


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield each command that stands on a line of its own, with the page that it is of."""
    for page in GUIDES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"^    (mlx-lm-server|docker compose|make|helm)( .*)$", text, re.M):
            yield page.name, shlex.split("".join(line))


def of(program: str) -> list[list[str]]:
    return [words for _, words in commands() if words[0] == program]


def filled(words: list[str]) -> list[str]:
    pattern = rf"\b({'|'.join(PLACEHOLDERS)})\b"
    return [re.sub(pattern, lambda found: PLACEHOLDERS[found[1]], word) for word in words]


def test_every_page_but_monitoring_has_a_command_of_ours() -> None:
    pages = {page for page, words in commands() if words[0] in ("mlx-lm-server", "make")}
    assert pages == {page.name for page in GUIDES} - {"monitoring.md"}


def test_keys_are_made_as_the_pages_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    making = [words[1:] for words in of("mlx-lm-server") if words[1] == "keys"]
    assert len(making) == 3
    key = ""
    for number, words in enumerate(making):
        directory = tmp_path / f"keys-{number}"  # each page begins anew
        words = [
            str(directory) if word == "keys" and words[1] == "init" else word for word in words
        ]
        words[0] = "keys"
        assert cli.main([word.replace("SERVER_KEY", key) for word in words]) == 0
        key = key or re.findall(r"server key\s+([0-9a-f]{64})", capsys.readouterr().out)[0]


def test_the_server_takes_the_flags_of_the_pages() -> None:
    tried = 0
    for words in of("mlx-lm-server"):
        rest = filled(words[1:])
        if rest[0] == "keys":
            continue
        if rest[:2] == ["service", "install"]:
            rest = rest[2:]
        if not rest[0].startswith("-"):
            assert rest.pop(0) in cli.COMMANDS
        options, _ = parse_models(rest, {}, "guide")
        assert options.given
        tried += 1
    assert tried == 4


def test_targets_and_profiles_that_the_pages_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for words in of("make"):
        assert re.search(rf"(?m)^{words[1]}:", makefile), words
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"].values()
    profiles = {name for service in services for name in service["profiles"]}
    named = {words[words.index("--profile") + 1] for words in of("docker") if "--profile" in words}
    assert named == {"mac", "monitoring"} and named <= profiles


def test_the_values_of_the_page_about_kubernetes_are_rendered() -> None:
    page = (ROOT / "docs" / "deploy" / "kubernetes.md").read_text(encoding="utf-8")
    values = yaml.safe_load(re.findall(r"^    models:\n(?:      .*\n)+", page, re.M)[0])
    ((_, *words),) = of("helm")
    for name, value in (word.split("=") for word in words if "=" in word):
        place = values
        *path, last = name.split(".")
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    objects = chart.render(values)
    names = [chart.settings_of(engine).served_model_name[0] for engine in chart.engines_of(objects)]
    assert names == ["small", "large"]
