"""`python -m tests.clients`: installs real clients, runs real scenarios with each against a
real server, and writes the table of what works."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engine.backend.blas import load_fast_blas

load_fast_blas()  # before anything imports MLX

from engine.model.demo import demo_model_path  # noqa: E402
from tests.clients.environments import NotInstalled, command_for  # noqa: E402
from tests.clients.matrix import CLIENTS, SCENARIOS, Cell, Client, Row, table  # noqa: E402
from tests.clients.reciter import make_reciter  # noqa: E402
from tests.e2e.server import Server, serving  # noqa: E402

KEY = "a-secret-key"
SERVED = "a-model"
_SCENARIOS_S = 900


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("--model", default="demo", help="a directory, demo, or reciter")
    parser.add_argument("--only", default="", help="clients whose names match this expression")
    parser.add_argument("--keep", type=Path, help="install below this directory, and leave it")
    parser.add_argument("--write", type=Path, help="put the table into this file")
    options = parser.parse_args()
    clients = [client for client in CLIENTS if re.search(options.only, client.name)]
    with tempfile.TemporaryDirectory(prefix="clients-") as private:
        root = options.keep or Path(private)
        model = _model(options.model, Path(private))
        with serving(model, "--served-model-name", SERVED, "--api-key", KEY, "--no-ssd") as server:
            server.client.headers["authorization"] = f"Bearer {KEY}"
            rows = [row for same in _by_script(clients) for row in _try(same, root, server, model)]
    made = table(rows)
    print(made)
    if options.write is not None:
        text = options.write.read_text()
        head, marker, _ = text.partition("<!-- table -->\n")
        options.write.write_text(f"{head}{marker}\n{made}")
    failed = [cell for row in rows for cell in row.cells.values() if cell.result == "fail"]
    return 1 if failed else 0


def _model(name: str, private: Path) -> Path:
    match name:
        case "reciter":
            return make_reciter(private / "reciter")
        case "demo":
            return demo_model_path()
        case _:
            return Path(name)


def _by_script(clients: Sequence[Client]) -> list[list[Client]]:
    """Clients that are one for two APIs run once."""
    scripts = dict.fromkeys(client.script for client in clients)
    return [[client for client in clients if client.script == script] for script in scripts]


def _try(clients: Sequence[Client], root: Path, server: Server, tokenizer: Path) -> list[Row]:
    client = clients[0]
    print(f"{client.name} ...", file=sys.stderr, flush=True)
    try:
        found = _run(command_for(client, root), server, tokenizer)
    except NotInstalled as error:
        return [Row(each, dict.fromkeys(SCENARIOS, Cell("n/a", str(error)))) for each in clients]
    rows = []
    for each in clients:
        named = {name: found.get(each.prefix + name) for name in SCENARIOS}
        rows.append(Row(each, {name: cell for name, cell in named.items() if cell is not None}))
    for row in rows:
        told = ", ".join(f"{name} {cell.result}" for name, cell in row.cells.items())
        print(f"    {row.client.api}: {told}", file=sys.stderr, flush=True)
    return rows


def _run(command: Sequence[str], server: Server, tokenizer: Path) -> dict[str, Cell]:
    environment = {
        "CLIENT_TOKENIZER": str(tokenizer),
        "CLIENT_URL": f"http://127.0.0.1:{server.port}",
        "CLIENT_KEY": KEY,
        "CLIENT_MODEL": SERVED,
    }
    try:
        ran = subprocess.run(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=_SCENARIOS_S,
        )
    except subprocess.TimeoutExpired:
        return dict.fromkeys(SCENARIOS, Cell("fail", f"not done after {_SCENARIOS_S} s"))
    found = {}
    for line in ran.stdout.splitlines():
        try:
            said = json.loads(line)
            found[said["scenario"]] = Cell(said["result"], said["reason"])
        except (ValueError, KeyError, TypeError):
            print(line, file=sys.stderr)  # a client that prints
    if not found:
        return dict.fromkeys(SCENARIOS, Cell("fail", f"ended with code {ran.returncode}"))
    return found


if __name__ == "__main__":
    sys.exit(main())
