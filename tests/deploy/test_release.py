"""`make release`: what it changes, and what it refuses. `make dist` builds and tries packages."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.processes.listener import listen
from services.supervision import local
from shared.settings import parse_models

ROOT = Path(__file__).parents[2]
CHART = Path("deploy/helm/mlx-lm-server/Chart.yaml")
FILES = (Path("pyproject.toml"), Path("CHANGELOG.md"), CHART)


@pytest.fixture(scope="module")
def release() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "deploy" / "release.py"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a copy of the files that name a version."""
    for file in FILES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def test_a_new_version_is_written_wherever_one_is_named(
    release: dict[str, Any], tree: Path
) -> None:
    before = (tree / "CHANGELOG.md").read_text()
    release["change_version"](tree, "7.8.9rc2")
    assert release["version_of"](tree) == "7.8.9rc2"
    chart = yaml.safe_load((tree / CHART).read_text())
    assert (chart["version"], chart["appVersion"]) == ("7.8.9-rc.2", "7.8.9rc2")
    changelog = (tree / "CHANGELOG.md").read_text()
    heading = r"## \[Unreleased\]\n\n## \[7\.8\.9rc2\] - \d{4}-\d\d-\d\d\n"
    assert re.sub(heading, "## [Unreleased]\n", changelog) == before
    with pytest.raises(release["ReleaseError"], match="nothing below"):
        release["change_version"](tree, "7.8.9")


@pytest.mark.parametrize("version", ["1.2", "v1.2.3", "1.2.3-rc.1", ""])
def test_what_is_no_version_is_refused(release: dict[str, Any], tree: Path, version: str) -> None:
    with pytest.raises(release["ReleaseError"], match="is not a version"):
        release["change_version"](tree, version)


def test_a_wheel_that_lacks_a_module_is_refused(release: dict[str, Any], tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("router/__init__.py", "")
    with pytest.raises(release["ReleaseError"], match="the wheel lacks"):
        release["check_contents"](wheel, wheel)


def test_every_way_of_the_guide_to_install_a_wheel_is_tried(release: dict[str, Any]) -> None:
    found = dict(release["guide_commands"](Path("/dist/a.whl")))
    assert found["uv"] == 'uv tool install "/dist/a.whl[cpu]"'
    assert list(found) == ["uv", "pipx", "pip"]


def test_a_guide_without_commands_is_refused(
    release: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs/deploy").mkdir(parents=True)
    (tmp_path / "docs/deploy/install.md").write_text("| pip | `pip install WHEEL` |\n")
    check_guide = release["check_guide"]
    monkeypatch.setitem(check_guide.__globals__, "ROOT", tmp_path)
    with pytest.raises(release["ReleaseError"], match="no command that installs SOURCE"):
        check_guide(tmp_path / "a.whl", "1.2.3")


def test_a_release_waits_for_what_a_server_announces(
    release: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options, models = parse_models(["--model=demo", "--host=127.0.0.1"], {}, "mlx-lm-server")
    with listen("127.0.0.1", 0) as http:
        local.announcement(options, models, http)()
        port = http.getsockname()[1]
    assert release["READY"].format(port=port) in capsys.readouterr().out


def test_the_chart_has_the_version_of_the_package(release: dict[str, Any]) -> None:
    chart = yaml.safe_load((ROOT / CHART).read_text())
    assert chart["appVersion"] == release["version_of"](ROOT)


@pytest.mark.skipif(shutil.which("ruby") is None, reason="there is no Ruby")
def test_the_formula_is_ruby() -> None:
    formula = ROOT / "deploy" / "homebrew" / "mlx-lm-server.rb"
    checked = subprocess.run(["ruby", "-wc", str(formula)], capture_output=True, text=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "Syntax OK\n", "")


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=str)
def test_workflows_use_targets_that_exist(path: Path) -> None:
    text = path.read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"run: make ([\w-]+)", text):
        assert re.search(rf"(?m)^{target}:", makefile), target
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    for target in re.findall(r"{ target: ([\w-]+)", text):
        assert f" AS {target}\n" in dockerfile
    assert all(job["timeout-minutes"] for job in yaml.safe_load(text)["jobs"].values())
