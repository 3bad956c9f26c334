"""The examples of the documentation are what the server takes."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from shared.settings import parse_models

OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def test_the_file_with_several_models_is_valid(tmp_path: Path) -> None:
    text = OPERATIONS.read_text(encoding="utf-8")
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
