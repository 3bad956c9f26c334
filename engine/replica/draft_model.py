"""Loads the draft model of a replica."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from mlx.utils import tree_flatten

from engine import device
from engine.batch.ragged import RaggedBatch
from engine.cache.quantization import UNQUANTIZED
from engine.executor.base import Executor
from engine.executor.draft_model import ROOM_TOKENS, DraftModel
from engine.model import load as models
from engine.model.errors import ModelUnavailable
from engine.model.load import LoadedModel
from engine.plan import page_tokens
from engine.proving.choose import choose_executor
from engine.proving.remembered import ProofRecord, code_digest
from engine.replica.memory import EngineMemory
from shared.settings import Settings

logger = logging.getLogger(__name__)

MAX_ROWS = 16
"""Max sequences that it drafts for at once, whatever the batch."""


def open_draft_model(
    target: LoadedModel, settings: Settings, proofs: Path | None, wait: Callable[[], None]
) -> tuple[DraftModel | None, int]:
    """Load the model of ``--draft-model-path``. Return it, and the bytes of its weights; None and 0
    if no draft model is used. ``wait`` is the `Executor.wait` of ``target``.

    Raises `ModelUnavailable` if it cannot be loaded, has another vocabulary than ``target``, or
    cannot be rewound after rejected drafts."""
    if settings.draft_model_path is None or settings.spec_decode not in ("draft", "auto"):
        return None, 0
    name = settings.draft_model_path
    loaded = models.load(models.resolve(name), trust_remote_code=settings.trust_remote_code)
    check_vocabulary(_vocabulary(target), _vocabulary(loaded), name)
    if loaded.eos_token_ids != target.eos_token_ids:
        logger.warning(
            "the draft model ends answers with tokens %s, the model with %s: drafts near the end "
            "will be wrong",
            list(loaded.eos_token_ids),
            list(target.eos_token_ids),
        )
    executor, weights_bytes = _open_executor(loaded, settings, proofs)
    rows = min(settings.max_batch_size, MAX_ROWS)
    if settings.spec_decode == "draft":
        rows = min(rows, settings.spec_decode_disable_batch_size)
    context = min(settings.draft_context_len, loaded.context_length // 2)
    page = page_tokens(settings.block_size)
    capacity = -(-min(context + ROOM_TOKENS, loaded.context_length) // page) * page
    source = DraftModel(
        executor,
        wait,
        context_tokens=context,
        capacity=capacity,
        rows=rows,
        page_tokens=page,
        vocab_size=loaded.vocab_size,
    )
    logger.info(
        "draft model: %s, with %.2f GB for weights and %.2f GB for %d sequences of %d tokens",
        name,
        weights_bytes / 1e9,
        source.slots_bytes / 1e9,
        rows,
        capacity,
    )
    return source, weights_bytes


def _open_executor(
    loaded: LoadedModel, settings: Settings, proofs: Path | None
) -> tuple[Executor, int]:
    """Return the executor of the draft model ``loaded``, and the bytes of its weights."""
    layers = device.move_layers(
        loaded.model, settings.cpu_precision, EngineMemory.of(settings).size_bytes
    )
    moved = None if layers is None else layers.names
    block_size = settings.block_size
    record = None
    if proofs is not None:
        code = code_digest(loaded.path.glob("*.py"))
        model = loaded.fingerprint, loaded.adapter, code, loaded.vocab_size
        record = ProofRecord(proofs, model, (block_size, 16, settings.kv_group_size, 0), moved)
    executor, reason, _ = choose_executor(
        loaded.model, loaded.vocab_size, page_tokens(block_size), UNQUANTIZED, record
    )
    if executor.spec.state_bytes or not executor.spec.batches_decodes:
        why = reason or "its recurrent layers cannot be rewound to an earlier token"
        raise ModelUnavailable(
            f"--draft-model-path: cannot draft with {settings.draft_model_path}: {why}"
        )
    weights_bytes = sum(array.nbytes for _, array in tree_flatten(loaded.model.parameters()))
    if layers is not None:
        weights_bytes += layers.nbytes
        batch_class = getattr(executor, "batch_class", RaggedBatch)
        layers.keep_packed() if batch_class.runs_model else layers.drop()
    executor.release_weights(loaded.weight_files)
    return executor, weights_bytes


def check_vocabulary(target: Mapping[str, int], draft: Mapping[str, int], name: str) -> None:
    """Raise `ModelUnavailable` if the draft model ``name`` has other tokens, or other ids for the
    same tokens, than the target."""
    different = sorted(
        token for token in {*target, *draft} if target.get(token) != draft.get(token)
    )
    if not different:
        return
    first = different[0]
    raise ModelUnavailable(
        f"--draft-model-path: {name} has another vocabulary than the model, as {len(different)} "
        f"tokens show: {first!r} is {draft.get(first, 'not')} there and "
        f"{target.get(first, 'not')} in the model's"
    )


def _vocabulary(loaded: LoadedModel) -> Mapping[str, int]:
    found: Mapping[str, int] = loaded.tokenizer.get_vocab()
    return found
