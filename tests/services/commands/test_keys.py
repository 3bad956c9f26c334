"""`mlx-lm-server keys` in a directory that has keys already."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.commands import keys
from shared.network.allow_list import read_allow_list
from shared.network.curve import ALLOW_LIST, EngineKeys, KeyPair, load_public

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


def test_new_keys_of_a_server_leave_the_engines_elsewhere_on_the_list(tmp_path: Path) -> None:
    directory = f"--curve-dir={tmp_path}"
    elsewhere = KeyPair.fresh().public
    assert keys.main(["allow", directory, elsewhere, "--name=studio", "--model=small"]) == 0
    assert keys.main(["init", directory]) == 0
    first = read_allow_list(tmp_path / ALLOW_LIST)
    for each in ("server.key", "server.secret", "engine.key", "engine.secret"):
        (tmp_path / each).unlink()
    assert keys.main(["init", directory]) == 0
    second = read_allow_list(tmp_path / ALLOW_LIST)
    assert first[elsewhere] == second[elsewhere]
    assert [one.name for one in second.values()] == ["studio", "native"]
    assert second.keys() - {elsewhere} == {load_public(tmp_path, "engine")}


def test_keys_beside_an_unreadable_list_are_not_created(tmp_path: Path) -> None:
    (tmp_path / ALLOW_LIST).write_text("nonsense\n")
    assert keys.main(["init", f"--curve-dir={tmp_path}"]) == 1
    assert [each.name for each in tmp_path.iterdir()] == [ALLOW_LIST]
