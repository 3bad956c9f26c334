"""The command: a list, one model with several precisions of its KV cache, a download."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.backend.blas import load_fast_blas
from services.commands.admin_client import table
from services.commands.models.local import LocalModel, directory_of, examined, local_models
from services.commands.parser import CommandParser
from shared import settings
from shared.exits import EXIT_FAILED, EXIT_OK, EXIT_USAGE, fail
from shared.settings import Settings

PROG = "mlx-lm-server models"
KV_BITS: tuple[Any, ...] = (16, 8, 4)
_SEQUENCES = (1, 4, 8, 16)
_GB = 1e9
_WITH_NAME = {"ls": False, "show": True, "pull": True}
"""The commands, and whether they take a name."""


def main(argv: Sequence[str]) -> int:
    """Run the command in ``argv``; return the exit code."""
    words = list(argv)
    if {"-h", "--help"} & {*words}:
        _parser().print_help()
        return EXIT_OK
    command = words.pop(0) if words and words[0] in _WITH_NAME else "ls"
    name = words.pop(0) if _WITH_NAME.get(command) and words and words[0][:1] != "-" else ""
    if _WITH_NAME.get(command) and not name:
        return fail(PROG, f"{command}: NAME is required", EXIT_USAGE)
    as_json = "--json" in words
    # Parsed by hand, because argparse would take the values of the server's flags for commands.
    wanted = settings.parse([word for word in words if word != "--json"], os.environ, PROG)
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    load_fast_blas()  # before anything imports mlx
    if command == "pull":
        from services.commands.models.pull import pull

        return pull(name)
    if command == "show":
        path = directory_of(name)
        if path is None:
            return fail(
                PROG, f"{name} is not on this machine: download it with {PROG} pull", EXIT_FAILED
            )
        return _show(examined(name, path, wanted), wanted, as_json=as_json)
    found = [examined(name, path, wanted) for name, path in local_models()]
    sys.stdout.write(_list(found, wanted, as_json=as_json))
    return EXIT_OK


def parser() -> argparse.ArgumentParser:
    """Return the parser for completion."""
    return _parser(settings.flag_parser(PROG))


def _parser(*of_flags: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return the parser for help; ``of_flags`` are added for completion."""
    made: argparse.ArgumentParser = CommandParser(
        prog=PROG,
        usage="%(prog)s [ls | show NAME | pull NAME] [--json] [flags of serve]",
        description="List the models on this machine, with the context in tokens that fits next "
        "to each in an engine with the given flags (--memory-gb, --kv-bits, "
        "--max-batch-size, ...).",
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    commands = made.add_subparsers(metavar="COMMAND")
    for name, help in (
        ("ls", "list the models (the default)"),
        ("show", "show what fits for one model, by KV cache bits and number of sequences"),
        ("pull", "download a model, or its missing files"),
    ):
        flags = () if name == "pull" else of_flags
        each = commands.add_parser(
            name, help=help, description=help, parents=flags, add_help=not flags
        )
        if _WITH_NAME[name]:
            each.add_argument("name", metavar="NAME", help="a Hugging Face model id, or demo")
    return made


def _list(found: Sequence[LocalModel], wanted: Settings, *, as_json: bool) -> str:
    if as_json:
        return json.dumps([_as_data(each, wanted) for each in found]) + "\n"
    if not found:
        return (
            f"no models on this machine; download one with {PROG} pull NAME, such as "
            f"{Settings().model}, or demo\n"
        )
    at_once = wanted.max_batch_size
    rows: list[list[object]] = [["MODEL", "GB", "IMAGES", "CONTEXT", "FITS", f"FITS x{at_once}"]]
    notes = []
    for each in found:
        size, images = f"{each.weights_bytes / _GB:.2f}", "yes" if each.takes_images else "-"
        rows.append([each.name, size, images, *_fits(each, at_once)])
        if each.trouble:
            notes.append(f"{each.name}: {each.trouble}")
        elif each.forecast is not None and not each.forecast.fits:
            notes.append(f"{each.name}: {_too_large(each)}")
    lines = [table(rows), ""]
    lines += [
        f"context in tokens for one sequence and for {at_once}, with a {wanted.kv_bits}-bit KV "
        "cache"
    ]
    return "\n".join([*lines, *notes]) + "\n"


def _fits(model: LocalModel, at_once: int) -> list[str]:
    found = model.forecast
    if found is None:
        return ["-", "broken", "broken"]
    contexts = [found.context(number) for number in (1, at_once)]
    return [f"{found.context_length:,}", *(f"{each:,}" if each else "no" for each in contexts)]


def _too_large(model: LocalModel) -> str:
    assert model.forecast is not None
    found = model.forecast
    return (
        f"{found.weights_bytes / _GB:.1f} GB of weights and the smallest KV cache do not fit in "
        f"{found.memory_bytes / _GB:.1f} GB"
    )


def _as_data(model: LocalModel, wanted: Settings) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": model.name,
        "path": str(model.path),
        "weights_bytes": model.weights_bytes,
        "takes_images": model.takes_images,
        "trouble": model.trouble or None,
    }
    if (found := model.forecast) is not None:
        data |= {
            "fits": found.fits,
            "memory_bytes": found.memory_bytes,
            "kv_bits": found.spec.kv_bits,
            "kv_bytes": found.sizes.kv_bytes,
            "num_blocks": found.sizes.num_blocks,
            "context_length": found.context_length,
            "context": {str(n): found.context(n) for n in (1, wanted.max_batch_size)},
        }
    return data


def _show(model: LocalModel, wanted: Settings, *, as_json: bool) -> int:
    if as_json:
        sys.stdout.write(json.dumps(_as_data(model, wanted)) + "\n")
        return EXIT_FAILED if model.trouble else EXIT_OK
    if model.forecast is None:
        return fail(PROG, f"{model.name}: {model.trouble}", EXIT_FAILED)
    found = model.forecast
    lines = [f"{model.name} in {model.path}", _weights_line(model)]
    rows: list[list[object]] = [["SEQUENCES", *(f"{bits}-bit KV" for bits in KV_BITS)]]
    by_bits = [_with_bits(model, wanted, bits) for bits in KV_BITS]
    for number in _SEQUENCES:
        fits = [0 if each.forecast is None else each.forecast.context(number) for each in by_bits]
        rows.append([number, *(_context(each, found.context_length) for each in fits)])
    lines += ["", "context in tokens of each sequence, by number of sequences:", table(rows)]
    if not found.fits:
        lines += ["", _too_large(model)]
    sys.stdout.write("\n".join(lines) + "\n")
    return EXIT_OK


def _weights_line(model: LocalModel) -> str:
    assert model.forecast is not None
    found = model.forecast
    return (
        f"{model.weights_bytes / _GB:.2f} GB on disk, {found.weights_bytes / _GB:.2f} GB in memory"
        f" of {found.memory_bytes / _GB:.1f} GB; made for {found.context_length:,} tokens"
        f"{' and images' if model.takes_images else ''}"
    )


def _with_bits(model: LocalModel, wanted: Settings, bits: Any) -> LocalModel:
    return examined(model.name, Path(model.path), dataclasses.replace(wanted, kv_bits=bits))


def _context(tokens: int, most: int) -> str:
    if not tokens:
        return "no"
    return f"{tokens:,}" + (" (all)" if tokens >= most else "")
