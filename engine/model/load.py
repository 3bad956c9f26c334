"""Finds a model by its name and loads it, through mlx-lm."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.model import adapter, multimodal, rotation, sharding
from engine.model.context import context_length, served_context, vocabulary_size
from engine.model.demo import demo_model_path, on_cpu
from engine.model.errors import ModelUnavailable
from engine.model.fingerprint import digest
from engine.model.hub import patience
from engine.model.tiktoken import tokenizer_directory
from shared.paths import user_path
from shared.wire import TOKENIZER_FILES

if TYPE_CHECKING:  # not at run time: a fast BLAS must be loaded before MLX
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper

DEMOS = ("demo", "demo-fp32", "demo-4bit")
"""The names of the demo model: with the original codes on a CPU; dequantized; with codes."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SystemExit)


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """User settings that override the tokenizer's; None keeps the tokenizer's."""

    eos_token: str | None = None
    bos_token: str | None = None
    pad_token: str | None = None
    chat_template: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A loaded model, and its properties for the engine."""

    model: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    path: Path
    fingerprint: str  # identifies config and weights (see `fingerprint`)
    adapter: str  # the fingerprint of the adapter; empty without one
    context_length: int  # the longest sequence that is served, in tokens
    vocab_size: int  # the width of the logits, which may exceed the tokenizer's vocabulary
    eos_token_ids: tuple[int, ...]
    parameters: int
    tokenizer_files: dict[str, Path]
    """By name: those of `shared.wire.TOKENIZER_FILES` that the model has."""

    @property
    def weight_files(self) -> list[Path]:
        return _weight_files(self.path)


def resolve(model: str) -> Path:
    """Return the directory of ``model``: the demo model, a local path, or a Hugging Face model id.

    A model that is not on this machine is downloaded. Raises `ModelUnavailable` with a one-line
    message if there is no such model or it cannot be downloaded.
    """
    if model in DEMOS:
        return demo_model_path(quantized=keeps_codes(model))
    path = user_path(model)
    try:
        if path.exists():
            return _checked(path)
    except OSError as error:  # the name is too long, or access is denied
        raise ModelUnavailable(f"there is no model at {model}: {error.strerror}") from None
    if not HUB_ID.fullmatch(model) or model.startswith("."):
        raise ModelUnavailable(
            f"there is no model at {model}: not a directory, and not a name like OWNER/MODEL"
        )
    return _checked(patience.download(model))


def keeps_codes(demo: str) -> bool:
    """Return whether the demo model of this name has the original codes."""
    return demo == "demo-4bit" or (demo == "demo" and on_cpu())


def load(
    path: Path,
    *,
    adapter_path: Path | None = None,
    max_kv_size: int | None = None,
    tokenizer_options: TokenizerOptions | None = None,
    trust_remote_code: bool = False,
    group: mx.distributed.Group | None = None,
) -> LoadedModel:
    """Load the model directory ``path`` (see `resolve`), with all weights in memory.

    With a ``group`` of ranks, load only this rank's part (see `sharding.shard`). The adapter in
    ``adapter_path`` is applied. ``max_kv_size`` as in `served_context`. Raises `ModelUnavailable`
    if mlx-lm cannot load the model (files are missing, the architecture is unknown, or it has its
    own code without ``trust_remote_code``), and `AdapterUnusable`.
    """
    from mlx_lm.utils import get_total_parameters

    if adapter_path is not None:
        adapter.check(adapter_path)
    options = tokenizer_options or TokenizerOptions()
    model, tokenizer, config = _load_with_mlx_lm(
        path, options, trust_remote_code, lazy=group is not None
    )
    parameters = get_total_parameters(model)
    model.deep_layers = multimodal.deep_layers(config)
    tokenizer_path = tokenizer_directory(path)
    if group is not None:
        sharding.shard(model, group, str(path))
    if adapter_path is not None:
        adapter.apply(model, adapter_path)
    _compute_constants(model)
    if options.chat_template is not None:
        tokenizer.chat_template = options.chat_template
    if options.eos_token is not None:
        tokenizer.add_eos_token(options.eos_token)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        path=path,
        fingerprint=fingerprint(path),
        adapter="" if adapter_path is None else adapter.fingerprint(adapter_path),
        context_length=served_context(model, context_length(config, model), max_kv_size),
        vocab_size=vocabulary_size(model, config) or len(tokenizer.vocab),
        eos_token_ids=tuple(sorted(tokenizer.eos_token_ids)),
        parameters=parameters,
        tokenizer_files={
            name: folder / name
            for folder in (path, tokenizer_path)  # the second one goes first
            for name in TOKENIZER_FILES
            if (folder / name).is_file()
        },
    )


def _compute_constants(model: nn.Module) -> None:
    """Compute arrays that are no weights, such as frequencies of rotations: if the first step
    computed them and failed, they would stay wrong."""
    from engine.backend.device_errors import compute

    compute(model)


def check_divisible(path: Path, name: str, *, trust: bool = False) -> None:
    """Raise `ModelUnavailable` if mlx-lm's class of the model in ``path`` cannot be divided across
    ranks. The model itself is not loaded."""
    from mlx_lm.utils import _get_classes, load_config

    try:
        config = load_config(path)
        if trust and config.get("model_file"):
            return  # its code runs when it is loaded
        model, _ = _get_classes(config)
    except LOAD_ERRORS as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelUnavailable(f"cannot load the model in {path}: {reason}") from error
    sharding.refuse_without_shard(model, str(config["model_type"]), name)


def fingerprint(path: Path) -> str:
    """Return a hex name for config and weights in ``path``, the same on every machine. It also
    covers code that comes with the model, because other code computes other keys and values."""
    config = path / "config.json"
    brings_code = b'"model_file"' in config.read_bytes()
    return digest(config, [*_weight_files(path), *(sorted(path.glob("*.py")) * brings_code)])


def _weight_files(path: Path) -> list[Path]:
    return sorted(path.glob("model*.safetensors"))


def _load_with_mlx_lm(
    path: Path, options: TokenizerOptions, trust: bool, *, lazy: bool
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    from mlx_lm.utils import load_tokenizer

    names = ("eos_token", "bos_token", "pad_token")
    given: dict[str, Any] = {name: token for name in names if (token := getattr(options, name))}
    if trust:
        given["trust_remote_code"] = True
    try:
        model, config = load_weights(path, lazy=lazy, trust=trust)
        eos_token_ids = config.get("eos_token_id")
        tokenizer = load_tokenizer(tokenizer_directory(path), given, eos_token_ids=eos_token_ids)
    except LOAD_ERRORS as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelUnavailable(f"cannot load the model in {path}: {reason}") from error
    return model, tokenizer, config


def load_weights(
    path: Path, *, lazy: bool, trust: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model in ``path`` and its config. With ``lazy``, arrays are read when they are
    used. Raises `LOAD_ERRORS`."""
    from mlx_lm.utils import load_config, load_model

    config = load_config(path)
    classes = multimodal.text_classes(config)
    own = {} if classes is None else {"get_model_classes": classes}
    added = rotation.older_names(config)
    found: tuple[nn.Module, dict[str, Any]] = load_model(
        path, lazy=lazy, trust_remote_code=trust, model_config=added, **own
    )
    return found


def _checked(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelUnavailable(f"{path} is not a model directory: it has no config.json")
    if not _weight_files(path):
        raise ModelUnavailable(f"{path} is not a model directory: it has no model*.safetensors")
    return path
