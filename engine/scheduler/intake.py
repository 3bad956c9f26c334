"""Intake of requests: a `Submit` becomes a sequence, or is refused with a reason."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import lru_cache
from math import prod

from engine.scheduler.config import SchedulerConfig
from engine.scheduler.planning.pictures import LARGEST_SHARE
from engine.scheduler.sequences.sequence import Sequence, SequencePicture
from engine.scheduler.sequences.thinking import ThinkingProgress
from shared import wire
from shared.hashing import Picture, block_hashes, prompt_root


class Refusal(Exception):
    """A request is not accepted; ``param`` names the field at fault."""

    def __init__(self, reason: wire.RefusalReason, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.reason: wire.RefusalReason = reason
        self.param = param

    def answer(self, request: wire.Submit) -> wire.Refused:
        return wire.Refused.of(request, self.reason, str(self), self.param)


def make_sequence(
    request: wire.Submit,
    config: SchedulerConfig,
    *,
    capacity: int,
    arrival: int,
    now_s: float,
) -> Sequence:
    """Return the sequence for ``request``. Its ``max_tokens`` is limited by the context, and by
    ``capacity``: the length in tokens of a sequence that has all memory to itself. Raises:
    `Refusal`."""
    _check_tokens(request, config.vocab_size)
    if request.max_tokens < 1:
        raise Refusal("invalid", f"max_tokens is {request.max_tokens}", "max_tokens")
    prompt_length = len(request.token_ids)
    if prompt_length >= config.context_length:
        raise Refusal(
            "too_large",
            f"the prompt has {prompt_length} tokens, which leaves no room for an answer "
            f"in a context of {config.context_length}",
            "prompt",
        )
    if prompt_length >= capacity:
        raise Refusal(
            "too_large",
            f"the prompt has {prompt_length} tokens, which leaves no room for an answer "
            f"in this engine's memory, which holds {capacity}",
            "prompt",
        )
    max_tokens = min(request.max_tokens, min(config.context_length, capacity) - prompt_length)
    pictures = _pictures(request, config)
    seq = Sequence(
        request=request,
        arrival=arrival,
        parent_hash=prompt_root(config.namespace, request.adapter_digest, request.cache_salt),
        block_size=config.block_size,
        token_ids=[*request.token_ids, *request.generated],
        max_tokens=max_tokens,
        submitted_s=now_s,
        thinking=ThinkingProgress(request.thinking) if request.thinking else None,
        pictures=pictures,
    )
    if config.prefix_cache:
        prompt = tuple(request.token_ids)
        seq.block_hashes += _prompt_hashes(
            seq.parent_hash, prompt, seq.block_size, *seq.hashed_pictures
        )
        seq.parent_hash = seq.block_hashes[-1] if seq.block_hashes else seq.parent_hash
        seq.update_block_hashes()
    return seq


@lru_cache(maxsize=1)
def _prompt_hashes(
    root: bytes, token_ids: tuple[int, ...], block_size: int, *pictures: Picture
) -> SequenceOf[bytes]:
    """Return the hashes of the full blocks of a prompt. All choices of a request have the same
    prompt, and hashing a long one takes as long as a decode step."""
    return block_hashes(root, token_ids, block_size, pictures)


def _pictures(request: wire.Submit, config: SchedulerConfig) -> tuple[SequencePicture, ...]:
    """Return the pictures of ``request`` after checking their positions in the prompt. Raises:
    `Refusal`."""
    if request.images and config.image_token_id is None:
        raise Refusal("unsupported", "this engine does not accept images for this model", "images")
    sizes: dict[bytes, int] = {}
    found = []
    for number, image in enumerate(request.images):
        end = image.start + image.length
        token_ids = tuple(request.token_ids[image.start : end])
        places = tuple(
            at for at, token in enumerate(token_ids, image.start) if token == config.image_token_id
        )
        if not places:
            raise Refusal("invalid", f"picture {number} covers no tokens of the prompt", "images")
        if len(places) * config.picture_token_bytes > LARGEST_SHARE * config.picture_bytes:
            raise Refusal("too_large", f"picture {number} does not fit into the memory", "images")
        if 0 < config.whole_picture_tokens < places[-1] + 1 - places[0]:
            message = f"picture {number} has more embeddings than are computed at once"
            raise Refusal("too_large", message, "images")
        if config.whole_picture_tokens and request.prompt_logprobs is not None:
            # A chunk with a whole picture would compute the logits of all its positions.
            message = "this model gives no log-probabilities of prompts with pictures"
            raise Refusal("unsupported", message, "prompt_logprobs")
        if image.arrays:
            sizes[image.digest] = sum(spec.nbytes for spec in image.arrays)
        size, grid = sizes[image.digest], image.grid
        if grid is not None and not len(places) == prod(grid) == image.length:
            raise Refusal(
                "invalid", f"picture {number} has other embeddings than its grid", "images"
            )
        found.append(SequencePicture(image.digest, image.start, end, places, token_ids, size, grid))
    return tuple(found)


def _check_tokens(request: wire.Submit, vocab_size: int) -> None:
    budget = request.thinking
    thinking_ids = [*budget.start_ids, *budget.end_ids] if budget else []
    if budget and (not budget.end_ids or budget.tokens < 0):
        raise Refusal("invalid", "the budget of reasoning cannot be enforced", "thinking")
    if not request.token_ids:
        raise Refusal("invalid", "the prompt is empty", "prompt")
    for param, ids in (
        ("prompt", request.token_ids),
        ("generated", request.generated),
        ("stop_token_ids", request.stop_token_ids),
        ("logprob_token_ids", request.logprob_token_ids),
        ("logit_bias", [token for token, _ in request.sampling.logit_bias]),
        ("xtc_special_ids", request.sampling.xtc_special_ids),
        ("grammar", request.grammar.after if request.grammar else []),
        ("thinking", thinking_ids),
        ("prediction", request.prediction),
    ):
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            raise Refusal("invalid", f"a token id is not in 0..{vocab_size - 1}", param)
