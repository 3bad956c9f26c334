"""`mlx-lm-server keys` in a directory that has keys already."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.commands import keys
from shared.network.curve import EngineKeys, KeyPair

SERVER = KeyPair.fresh().public


@pytest.mark.parametrize("command", ["init", "server"])
def test_an_engines_directory_gets_no_server_and_keeps_its_servers_key(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys.main(["engine", f"--curve-dir={tmp_path}", f"--server={SERVER}"]) == 0
    before = EngineKeys.load(tmp_path)
    assert keys.main([command, f"--curve-dir={tmp_path}"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert EngineKeys.load(tmp_path) == before
    assert not (tmp_path / "server.secret").exists()


def test_keys_of_both_sides_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    assert keys.main(["engine", f"--curve-dir={tmp_path}", f"--server={SERVER}"]) == 0
    (tmp_path / "server.key").unlink()
    before = sorted(tmp_path.iterdir())
    assert keys.main(["init", f"--curve-dir={tmp_path}"]) == 1
    assert sorted(tmp_path.iterdir()) == before
