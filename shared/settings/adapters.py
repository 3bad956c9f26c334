"""The settings of adapters that requests name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from shared.adapter_names import MAX_NAMED_ADAPTERS, is_adapter_name
from shared.flags import FlagError, flag
from shared.paths import user_path

MAX_RANK = 128
"""One adapter's share of a product must fit into one block of MLAS, ONNX Runtime's matmul
library. With more columns, its sums would depend on the rest of the batch."""


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    GROUP: ClassVar = "adapters"

    adapter: tuple[str, ...] = flag(
        (),
        "NAME=DIRECTORY of a LoRA adapter in the format of mlx-lm or PEFT; requests select it by "
        "setting model to NAME",
        split=False,
    )
    max_adapters: int | None = flag(
        None,
        "adapters in memory at once; a request for another one swaps it in",
        at_least=1,
        at_most=256,
        shown_default="the number of --adapter, at most 8",
    )
    max_adapter_rank: int = flag(
        16, "highest rank of an adapter that requests name", at_least=1, at_most=MAX_RANK
    )


def adapters_of(settings: AdapterSettings) -> dict[str, Path]:
    """Return the directories of adapters, by name. Raises: `FlagError`."""
    found = {}
    for each in settings.adapter:
        name, _, path = each.partition("=")
        if not path or not is_adapter_name(name):
            raise FlagError(
                f"--adapter: {each!r} is not NAME=DIRECTORY with a name of letters, digits and ._-"
            )
        if name in found:
            raise FlagError(f"--adapter: the name {name} is used twice")
        found[name] = user_path(path)
    if len(found) > MAX_NAMED_ADAPTERS:
        raise FlagError(f"--adapter: more than {MAX_NAMED_ADAPTERS}")
    return found


def from_tables(value: object, where: str) -> list[str]:
    """Return the values of ``--adapter`` that correspond to ``[[model.adapter]]``. Raises:
    `FlagError`."""
    if not isinstance(value, list):
        raise FlagError(f"--config: adapter of {where} is not a list of tables")
    found = []
    for each in value:
        if isinstance(each, str):
            found.append(each)
            continue
        is_table = isinstance(each, Mapping) and each.keys() == {"name", "path"}
        if not is_table or not all(isinstance(text, str) for text in each.values()):
            raise FlagError(
                f"--config: an adapter of {where} is not a table with the texts name and path"
            )
        found.append(f"{each['name']}={each['path']}")
    return found
