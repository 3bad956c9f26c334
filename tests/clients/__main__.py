"""`python -m tests.clients`: install real clients, run scenarios with each and LangChain's standard
tests against a real server, and write the tables of what works."""

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
from tests.clients.caller import make_caller  # noqa: E402
from tests.clients.environments import SCENARIOS as SCRIPTS  # noqa: E402
from tests.clients.environments import command_for  # noqa: E402
from tests.clients.matrix import (  # noqa: E402
    CLIENTS,
    DECISION_CLIENTS,
    DECISION_SCENARIOS,
    EMBEDDING_CLIENTS,
    EMBEDDING_SCENARIOS,
    INSERT_CLIENTS,
    INSERT_SCENARIOS,
    SCENARIOS,
    STANDARD_TESTS,
    Cell,
    Client,
    Row,
    joined,
    table,
    tests_table,
)
from tests.clients.reciter import make_reciter  # noqa: E402
from tests.e2e.installing import NotInstalled  # noqa: E402
from tests.e2e.server import Server, serving  # noqa: E402
from tests.page_tables import read_table, write_tables  # noqa: E402
from tests.text_models import make_text_model  # noqa: E402
from tests.tiny_models import make_inserting  # noqa: E402

KEY = "a-secret-key"
SERVED = "a-model"
ALIAS = "the-same-model"
EMBEDDER, RANKER = "an-embedder", "a-ranker"
_SCENARIOS_S = 900


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("--model", default="demo", help="a directory, demo, or reciter")
    parser.add_argument(
        "--only",
        default="",
        help="clients whose name and API, like 'litellm /api/chat', match this",
    )
    parser.add_argument("--keep", type=Path, help="install below this directory, and keep it")
    parser.add_argument("--write", type=Path, help="put the tables into this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="clients-") as private:
        root = options.keep or Path(private)
        model = _model(options.model, Path(private))
        rows, tested = _try_chats(root, Path(private), model, options.only)
        embedding = _try_embeddings(root, Path(private), model, options.only)
        decisions = _try_decisions(root, model, options.only)
        inserting = _try_inserts(root, Path(private), options.only)
    tables = {}
    if rows:
        tables["clients"] = _table("clients", rows, CLIENTS, SCENARIOS, options.write)
    if tested:
        tables["langchain-tests"] = tests_table(tested)
    if embedding:
        tables["embeddings"] = _table(
            "embeddings", embedding, EMBEDDING_CLIENTS, EMBEDDING_SCENARIOS, options.write
        )
    if decisions:
        tables["decisions"] = _table(
            "decisions", decisions, DECISION_CLIENTS, DECISION_SCENARIOS, options.write
        )
    if inserting:
        tables["inserts"] = _table(
            "inserts", inserting, INSERT_CLIENTS, INSERT_SCENARIOS, options.write
        )
    print("\n".join(tables.values()))
    if options.write is not None:
        write_tables(options.write, tables)
    all_rows = (*rows, *embedding, *decisions, *inserting)
    cells = [*tested.values(), *(cell for row in all_rows for cell in row.cells.values())]
    return 1 if any(cell.result == "fail" for cell in cells) else 0


def _chosen(clients: Sequence[Client], only: str) -> list[Client]:
    return [client for client in clients if re.search(only, f"{client.name} {client.api}")]


def _table(
    name: str,
    rows: Sequence[Row],
    clients: Sequence[Client],
    scenarios: Sequence[str],
    page: Path | None,
) -> str:
    """Return the table of ``rows``, which replace those of the same clients on the ``page``."""
    old = "" if page is None else read_table(page, name)
    return table(joined(old, rows, clients, scenarios), scenarios)


def _model(name: str, private: Path) -> Path:
    match name:
        case "reciter":
            return make_reciter(private / "reciter")
        case "demo":
            return demo_model_path()
        case _:
            return Path(name)


def by_run(clients: Sequence[Client]) -> list[list[Client]]:
    """Group clients by script and packages. Such a group is run once for all its APIs."""
    runs: dict[tuple[str, tuple[str, ...]], list[Client]] = {}
    for client in clients:
        runs.setdefault((client.script, client.packages), []).append(client)
    return list(runs.values())


def _try_chats(
    root: Path, private: Path, model: Path, only: str
) -> tuple[list[Row], dict[str, Cell]]:
    """Run the clients that generate text, and LangChain's standard tests, against a server with
    ``model``, beside one that calls a tool."""
    clients, has_tests = _chosen(CLIENTS, only), re.search(only, STANDARD_TESTS.name)
    if not clients and not has_tests:
        return [], {}
    names = ("--served-model-name", SERVED, "--served-model-name", ALIAS)
    flags = (*names, "--api-key", KEY, "--no-ssd")
    with (
        serving(model, *flags) as server,
        serving(make_caller(private / "caller"), *flags) as second,
    ):
        os.environ["CLIENT_CALLER"] = second.url
        rows = [row for same in by_run(clients) for row in _try(same, root, server, model)]
        return rows, _standard_tests(root, server, model) if has_tests else {}


def _try_embeddings(root: Path, private: Path, model: Path, only: str) -> list[Row]:
    """Run the clients for embeddings and rankings against a server with tiny models for these, and
    ``model``."""
    clients = _chosen(EMBEDDING_CLIENTS, only)
    if not clients:
        return []
    config = write_config(private)
    with config.open("a") as file:
        file.write(f'[[model]]\nid = "{SERVED}"\npath = "{model}"\n')
    with serving(None, "--config", str(config), "--api-key", KEY, "--no-ssd") as server:
        os.environ["CLIENT_CALLER"] = server.url
        return [
            row
            for client in clients
            for row in _try([client], root, server, config, EMBEDDING_SCENARIOS)
        ]


def _try_decisions(root: Path, model: Path, only: str) -> list[Row]:
    """Run the clients that ask typed questions against a server with ``model``."""
    clients = _chosen(DECISION_CLIENTS, only)
    if not clients:
        return []
    with serving(model, "--served-model-name", SERVED, "--api-key", KEY, "--no-ssd") as server:
        found = [_try([client], root, server, model, DECISION_SCENARIOS) for client in clients]
    return [row for rows in found for row in rows]


def _try_inserts(root: Path, private: Path, only: str) -> list[Row]:
    """Run the clients for fill-in-the-middle against a server with a random model for it."""
    clients = _chosen(INSERT_CLIENTS, only)
    if not clients:
        return []
    model = make_inserting(private / "inserting")
    flags = ("--served-model-name", SERVED, "--api-key", KEY, "--no-ssd")
    with serving(model, *flags) as server:
        return [
            row
            for client in clients
            for row in _try([client], root, server, model, INSERT_SCENARIOS)
        ]


def write_config(private: Path) -> Path:
    """Write a model that embeds and one that ranks, and return the file that names both."""
    kinds = ((EMBEDDER, "bert"), (RANKER, "xlm_roberta_reranker"))
    tables = [
        f'[[model]]\nid = "{name}"\npath = "{make_text_model(kind, private / name)}"\n'
        for name, kind in kinds
    ]
    config = private / "embeddings.toml"
    config.write_text("".join(tables))
    return config


def _try(
    clients: Sequence[Client],
    root: Path,
    server: Server,
    tokenizer: Path,
    scenarios: Sequence[str] = SCENARIOS,
) -> list[Row]:
    client = clients[0]
    print(f"{client.name} ...", file=sys.stderr, flush=True)
    try:
        names = [each.prefix + name for each in clients for name in scenarios]
        cells = _run([*command_for(client, root), *names], server, tokenizer, scenarios)
    except NotInstalled as error:
        return [Row(each, dict.fromkeys(scenarios, Cell("n/a", str(error)))) for each in clients]
    rows = []
    for each in clients:
        named = {name: cells.get(each.prefix + name) for name in scenarios}
        rows.append(Row(each, {name: cell for name, cell in named.items() if cell is not None}))
    for row in rows:
        results = ", ".join(f"{name} {cell.result}" for name, cell in row.cells.items())
        print(f"    {row.client.api}: {results}", file=sys.stderr, flush=True)
    return rows


def _standard_tests(root: Path, server: Server, tokenizer: Path) -> dict[str, Cell]:
    name = STANDARD_TESTS.name
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        return _run(command_for(STANDARD_TESTS, root), server, tokenizer, (name,))
    except NotInstalled as error:
        return {name: Cell("n/a", str(error))}


def _run(
    command: Sequence[str],
    server: Server,
    tokenizer: Path,
    expected: Sequence[str] = SCENARIOS,
) -> dict[str, Cell]:
    """Return the cells of the scenarios that ``command`` runs. If it reports none, all that are
    ``expected`` have failed."""
    try:
        done = subprocess.run(
            command,
            env=environment_of(server) | {"CLIENT_TOKENIZER": str(tokenizer)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=_SCENARIOS_S,
        )
    except subprocess.TimeoutExpired:
        return dict.fromkeys(expected, Cell("fail", f"not done after {_SCENARIOS_S} s"))
    cells = {}
    for line in done.stdout.splitlines():
        try:
            report = json.loads(line)
            cells[report["scenario"]] = Cell(report["result"], report["reason"])
        except (ValueError, KeyError, TypeError):
            print(line, file=sys.stderr)  # output of the client
    if not cells:
        return dict.fromkeys(expected, Cell("fail", f"ended with code {done.returncode}"))
    return cells


def environment_of(server: Server) -> dict[str, str]:
    """Return the variables that scenarios read."""
    return os.environ | {
        "PYTHONPATH": str(SCRIPTS),
        "CLIENT_URL": server.url,
        "CLIENT_KEY": KEY,
        "CLIENT_MODEL": SERVED,
        "CLIENT_ALIAS": ALIAS,
        "CLIENT_EMBEDDER": EMBEDDER,
        "CLIENT_RANKER": RANKER,
    }


if __name__ == "__main__":
    sys.exit(main())
