"""Checks of the models: whether they exist, are complete, and fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from engine.adapters.checkpoint import AdapterError, check
from engine.model.errors import ModelUnavailable
from engine.model.load import DEMOS, HUB_ID
from services.commands.doctor.report import Check, attempt, bad, good, warning
from services.commands.models.local import directory_of
from services.processes.model_files import problems
from shared.paths import user_path
from shared.settings import ModelEntry, Settings, adapters_of

_GB = 1e9


def checks(entry: ModelEntry) -> Iterator[Check]:
    """Look at the model of ``entry``, its draft model, and its adapters."""
    options = entry.settings
    found = _model("--model", options.model)
    yield found
    if options.draft_model_path is not None and options.spec_decode in ("draft", "auto"):
        yield _model("--draft-model-path", options.draft_model_path)
    remedy = "create it with mlx_lm.lora, or correct the path"
    if options.adapter_path is not None:
        from engine.model import adapter  # imports MLX

        work = partial(adapter.check, options.adapter_path)
        text = str(options.adapter_path)
        yield attempt("adapter", text, work, remedy, ModelUnavailable, flag="--adapter-path")
    for name, path in adapters_of(options).items():
        work = partial(check, path)
        text, flag = f"{name} in {path}", f"--adapter {name}"
        yield attempt("adapter", text, work, remedy, AdapterError, flag=flag)
    directory = directory_of(options.model)
    if found.verdict == "ok" and directory is not None:
        yield _memory(options, directory)


def _model(flag: str, model: str) -> Check:
    directory = directory_of(model)
    if directory is None:
        return _absent(flag, model)
    if wrong := problems(directory):
        fix = f"mlx-lm-server models pull {model} downloads what is missing"
        if user_path(model).is_dir():
            fix = "copy or convert it again"
        return bad("model", f"{flag}: {_named(model, directory)}: {'; '.join(wrong)}", fix)
    return good("model", _named(model, directory))


def _named(model: str, directory: Path) -> str:
    return model if user_path(model) == directory else f"{model} in {directory}"


def _absent(flag: str, model: str) -> Check:
    if model in DEMOS:
        return Check("model", f"{model}: 93 MB will be downloaded at the first start")
    if HUB_ID.fullmatch(model) and not model.startswith("."):
        return Check("model", f"{model} is not on this machine and will be downloaded at startup")
    remedy = "mlx-lm-server models lists the local ones"
    return bad("model", f"{flag}: folder {model} does not exist", remedy)


def _memory(options: Settings, directory: Path) -> Check:
    try:
        from engine.replica.forecast import forecast  # imports MLX

        found = forecast(directory, options)
    except ModelUnavailable as error:
        return bad("model", f"--model: {error}", "mlx-lm must support the model's architecture")
    except (
        Exception
    ) as error:  # a broken installation may raise anything, which is then the finding
        return bad("model memory", f"mlx-lm does not work: {error}", "fix the BAD findings above")
    weights = f"weights of {found.weights_bytes / _GB:.1f} GB"
    memory = f"{found.memory_bytes / _GB:.1f} GB of memory"
    if not found.fits:
        flag = "--memory-gb" if options.memory_gb is not None else "this machine"
        starts = found.weights_bytes < found.memory_bytes
        return (warning if starts else bad)(
            "model memory",
            f"{weights} and the smallest KV cache do not fit in {memory} ({flag})",
            "use a smaller model or one with fewer bits, --kv-bits 4, fewer --num-blocks or "
            "--engines, or more memory",
        )
    at_once = options.max_batch_size
    return good(
        "model memory",
        f"{weights} in {memory}: room for a context of {found.context(1):,} tokens with one "
        f"sequence, {found.context(at_once):,} with {at_once} sequences",
    )
