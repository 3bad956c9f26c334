"""Builds a release into dist/ and checks it: `python deploy/release.py [--version X.Y.Z]`.

With --version, the places that name a version are changed first (`make release VERSION=X.Y.Z`
commits and tags them afterwards). The wheel is built from the source distribution, so that
nothing but what that contains is needed, and both are installed into environments of their own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
READY = ":{port}  (model demo, "
"""What the server prints when it is ready, in part."""
READY_S = 300.0
PACKAGES = ("services", "router", "engine", "kvstore", "shared")
QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
}


class ReleaseError(Exception):
    """The release is not right; the message says why."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="release", description=__doc__)
    parser.add_argument("--version", help="change to this version first")
    parser.add_argument(
        "--url", default="https://example.invalid", help="where the files will be, for Homebrew"
    )
    options = parser.parse_args(argv)
    try:
        if options.version:
            change_version(ROOT, options.version)
        version = version_of(ROOT)
        sdist, wheel = build(version)
        write_formula(sdist, version, options.url)
        check_contents(sdist, wheel)
        check_installed(sdist, wheel, version)
        check_guide(wheel, version)
    except ReleaseError as error:
        sys.stderr.write(f"release: {error}\n")
        return 1
    sys.stdout.write(f"dist/ has {version}, built, installed and tried\n")
    return 0


# -- the version ------------------------------------------------------------------


def version_of(root: Path) -> str:
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return version


def change_version(root: Path, version: str) -> None:
    """Write ``version`` everywhere; what is unreleased in the changelog becomes its own."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise ReleaseError(f"{version} is not a version like 1.2.3 or 1.2.3rc1")
    _replace(root / "pyproject.toml", r'(?m)^version = ".*"$', f'version = "{version}"')
    chart = root / "deploy" / "helm" / "mlx-lm-server" / "Chart.yaml"
    # Helm's versions are those of semver.org, with a hyphen before a pre-release.
    semver = re.sub(r"(\d)(a|b|rc)(\d+)$", r"\1-\2.\3", version)
    _replace(chart, r"(?m)^version: .*$", f"version: {semver}")
    _replace(chart, r"(?m)^appVersion: .*$", f'appVersion: "{version}"')
    changelog = root / "CHANGELOG.md"
    unreleased = re.search(r"## \[Unreleased\]\n(.*?)(?=\n## |\Z)", changelog.read_text(), re.S)
    if unreleased is None or not unreleased[1].strip():
        raise ReleaseError("CHANGELOG.md says nothing below [Unreleased]")
    day = datetime.now(UTC).date().isoformat()
    heading = f"## [Unreleased]\n\n## [{version}] - {day}\n"
    _replace(changelog, r"## \[Unreleased\]\n", heading)


def _replace(path: Path, pattern: str, text: str) -> None:
    changed, count = re.subn(pattern, lambda _: text, path.read_text(encoding="utf-8"))
    if count != 1:
        raise ReleaseError(f"{path.name}: {pattern} was found {count} times")
    path.write_text(changed, encoding="utf-8")


# -- building ---------------------------------------------------------------------


def build(version: str) -> tuple[Path, Path]:
    """Return the paths of the source distribution and of the wheel that was built from it."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    _run(sys.executable, "-W", "ignore", "-c", code, str(DIST), cwd=ROOT)
    sdist = DIST / f"mlx_lm_server-{version}.tar.gz"
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(DIST))
    _run(sys.executable, "-m", "pip", "wheel", *options, str(sdist))
    return sdist, DIST / f"mlx_lm_server-{version}-py3-none-any.whl"


def write_formula(sdist: Path, version: str, url: str) -> None:
    """Write the formula for Homebrew with the address and the hash of ``sdist``."""
    text = (ROOT / "deploy" / "homebrew" / "mlx-lm-server.rb").read_text()
    values = {
        "@URL@": f"{url.rstrip('/')}/{sdist.name}",
        "@SHA256@": hashlib.sha256(sdist.read_bytes()).hexdigest(),
    }
    for name, value in values.items():
        if text.count(name) != 1:
            raise ReleaseError(f"the formula has {text.count(name)} times {name}")
        text = text.replace(name, value)
    (DIST / "mlx-lm-server.rb").write_text(text)


def check_contents(sdist: Path, wheel: Path) -> None:
    """Compare with the tree: every module of the packages, and nothing else."""
    tracked = _run("git", "ls-files", *PACKAGES, "mlx_lm_server.py", cwd=ROOT).split()
    wanted = {name for name in tracked if name.endswith((".py", ".typed", ".html"))}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    if missing := wanted - found:
        raise ReleaseError(f"the wheel lacks {sorted(missing)}")
    if more := {name for name in found if not name.startswith(PACKAGES)} - wanted:
        raise ReleaseError(f"the wheel has {sorted(more)}")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in (*wanted, "LICENSE", "README.md", "requirements/serve.txt"):
        if name not in names:
            raise ReleaseError(f"the source distribution lacks {name}")


# -- trying -----------------------------------------------------------------------


def check_installed(sdist: Path, wheel: Path, version: str) -> None:
    """Install the wheel, then the source, and serve the demo model from the former."""
    with tempfile.TemporaryDirectory(prefix="release-") as directory:
        programs = Path(directory) / "venv" / "bin"
        _run(sys.executable, "-m", "venv", str(programs.parent))
        pip = (str(programs / "python"), "-m", "pip", "install", "--quiet")
        locked = ROOT / "requirements" / "serve.txt"
        _run(*pip, "--require-hashes", "--requirement", str(locked))
        for file in (sdist, wheel):
            _run(*pip, "--no-deps", "--force-reinstall", str(file))
            _run(str(programs / "python"), "-m", "pip", "check")
            for command in (["mlx-lm-server"], ["python", "-m", "mlx_lm_server"]):
                program, *rest = command
                said = _run(str(programs / program), *rest, "--version", cwd=Path(directory))
                if said.strip() != f"mlx-lm-server {version}":
                    raise ReleaseError(f"{' '.join(command)} --version says {said!r}")
        with serving(programs, Path(directory)) as url:
            answer = _ask(f"{url}/v1/chat/completions")
        if "Paris" not in answer:
            raise ReleaseError(f"the capital of France is {answer!r}")


def guide_commands(wheel: Path) -> Iterator[tuple[str, str]]:
    """Yield each row of docs/deploy/install.md that installs ``wheel``: its name, its command."""
    page = (ROOT / "docs" / "deploy" / "install.md").read_text(encoding="utf-8")
    for name, command in re.findall(r"^\| \[?(\w+).*? \| `(.*SOURCE.*)` \|$", page, re.MULTILINE):
        yield name, command.replace("SOURCE", str(wheel))


def check_guide(wheel: Path, version: str) -> None:
    """Install with each command of the guide whose program is here, with versions as they are."""
    commands = list(guide_commands(wheel))
    if not commands:
        raise ReleaseError("docs/deploy/install.md has no command that installs SOURCE")
    for name, command in commands:
        if name != "pip" and shutil.which(name) is None:
            sys.stdout.write(f"not tried, as {name} is not here: {command}\n")
            continue
        with tempfile.TemporaryDirectory(prefix="guide-") as directory:
            folders = {"UV_TOOL_DIR": "uv", "UV_TOOL_BIN_DIR": "bin"}
            folders |= {"PIPX_HOME": "pipx", "PIPX_BIN_DIR": "bin"}
            own = {variable: f"{directory}/{folder}" for variable, folder in folders.items()}
            _run("sh", "-ec", command, cwd=Path(directory), **own)
            programs = Path(directory, "llm/bin" if name == "pip" else "bin")
            said = _run(str(programs / "mlx-lm-server"), "--version", cwd=Path(directory))
            if said.strip() != f"mlx-lm-server {version}":
                raise ReleaseError(f"{command}: --version says {said!r}")


@contextmanager
def serving(programs: Path, directory: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [programs / "mlx-lm-server", "--model", "demo", "--host", "127.0.0.1"]
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", port, "--no-ssd"],
            cwd=directory,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            stdout=output,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + READY_S
        while READY.format(port=port) not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ReleaseError(f"the server does not start:\n{log.read_text()}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        if process.wait(60) != 0:
            raise ReleaseError(f"the server does not stop cleanly:\n{log.read_text()}")


def _ask(url: str) -> str:
    request = urllib.request.Request(
        url, json.dumps(QUESTION).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        text: str = json.load(answer)["choices"][0]["message"]["content"]
        return text


def _run(*command: str, cwd: Path | None = None, **variables: str) -> str:
    """Run a command without our packages on its path; return what it prints."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
