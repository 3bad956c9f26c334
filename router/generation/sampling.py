"""The parameters of a request: checked against the model, and put into messages to engines."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from router.errors import ContextLengthExceeded, InvalidRequest, InvalidValue
from router.fleet.engines.engine import Model
from router.fleet.tenants.tenant import Tenant
from router.schemas.requests import GenerationRequest
from router.tokens.image_prompts import Prompt
from shared.settings import Settings
from shared.wire import ImagePart, SamplingParams, Submit

MAX_SEQUENCES = 128
DEFAULT_MAX_TOKENS = 512
MAX_ENTRIES = 500_000
"""Max tokens and alternatives in an answer with log-probabilities or repeated prompts. Each takes
about a hundred bytes here and as many in the answer."""


def answer_limits(
    request: GenerationRequest, model: Model, prompts: Sequence[Prompt], max_tokens: int | None
) -> list[int]:
    """Return the max_tokens of the answer to each of ``prompts``; ``max_tokens`` is the request's.

    Raises `InvalidRequest` if the model cannot process the request, or the answer would be too
    large."""
    most = model.hello.vocab_size - 1
    for token in request.logit_bias or ():
        if token > most:
            raise InvalidValue(
                f"'logit_bias' contains the token id {token}; the maximum is {most}.",
                param="logit_bias",
            )
    reasons = request.may_reason and "reasoning" in model.renderer.capabilities
    lengths = [len(each.token_ids) for each in prompts]
    limits = [
        _answer_limit(model, each, max_tokens, request.max_context, reasons=reasons)
        for each in lengths
    ]
    _check_size(request, lengths, limits)
    return limits


def _check_size(request: GenerationRequest, lengths: Sequence[int], limits: Sequence[int]) -> None:
    """Raise `InvalidRequest` if answers of at most ``limits`` tokens, to prompts of ``lengths``,
    would have more than `MAX_ENTRIES`."""
    scored = request.num_logprobs is not None or request.prompt_logprobs is not None
    if not scored and not request.echoes:
        return
    n = request.n or 1
    entries = count_entries(
        request,
        [length for length in lengths for _ in range(n)],
        [limit for limit in limits for _ in range(n)],
    )
    if entries > MAX_ENTRIES:
        param = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        raise InvalidRequest(
            f"The answer may have {entries} tokens and alternatives; the limit is {MAX_ENTRIES}. "
            "Request fewer log-probabilities, tokens, prompts or choices.",
            param=param if scored else "echo",
            code="request_too_large",
        )


def count_entries(
    request: GenerationRequest, prompt_lengths: Sequence[int], output_lengths: Sequence[int]
) -> int:
    """Return the number of tokens and alternatives in an answer; the lengths are by choice."""
    output, per_prompt_token = (request.num_logprobs or 0) + 1, 0
    if request.prompt_logprobs is not None:
        per_prompt_token += request.prompt_logprobs + 1
    if request.echoes:
        per_prompt_token += output
    return sum(prompt_lengths) * per_prompt_token + sum(output_lengths) * output


def check_prompt_length(model: Model, num_tokens: int) -> None:
    """Raise `ContextLengthExceeded` if ``model`` does not accept a prompt of ``num_tokens``."""
    context, limit = model.hello.context_length, model.max_prompt_tokens
    if num_tokens >= context:
        raise ContextLengthExceeded(
            f"The prompt has {num_tokens} tokens, which leaves no room to generate in the "
            f"model's context of {context} tokens.",
            param="prompt",
        )
    if num_tokens > limit:
        raise ContextLengthExceeded(
            f"The prompt has {num_tokens} tokens; the limit is {limit}.", param="prompt"
        )


def check_prediction_length(model: Model, num_tokens: int) -> None:
    """Raise `ContextLengthExceeded` if no answer of ``model`` can have this many tokens."""
    context = model.hello.context_length
    if num_tokens > context:
        raise ContextLengthExceeded(
            f"The prediction has {num_tokens} tokens; the model's context is {context} tokens.",
            param="prediction",
        )


def fim_room(model: Model, max_tokens: int | None, max_context: int | None = None) -> int:
    """Return how many tokens a prompt for fill-in-the-middle may have beside an answer of
    ``max_tokens``: at least half of the context, or of ``max_context``."""
    settings = model.settings
    context = min(model.hello.context_length, max_context or model.hello.context_length)
    wanted = max_tokens or settings.default_max_tokens or DEFAULT_MAX_TOKENS
    answer = min(wanted, settings.max_generation_tokens, context // 2)
    return min(context - answer, model.max_prompt_tokens)


def _answer_limit(
    model: Model, length: int, max_tokens: int | None, max_context: int | None, *, reasons: bool
) -> int:
    """Return the max_tokens for a prompt of ``length``: ``max_tokens``, reduced to the room left in
    the context and to the server's limit. Agents ask for more than any model's context.

    ``max_context``, if given, is an upper limit for the context. If the answer may have reasoning
    (``reasons``), a request without ``max_tokens`` has no small limit: the reasoning alone could
    reach it, and the answer would be empty.

    Raises `ContextLengthExceeded` or `InvalidRequest`.
    """
    context, settings = model.hello.context_length, model.settings
    if not length:
        raise InvalidRequest("The prompt is empty.", param="prompt")
    check_prompt_length(model, length)
    if max_context is not None and max_context < context:
        context = max_context
        if length >= context:
            raise ContextLengthExceeded(
                f"The prompt has {length} tokens, which leaves no room to generate in the "
                f"{context} tokens that the request allows.",
                param="prompt",
            )
    default = settings.default_max_tokens
    if default is None:
        default = settings.max_generation_tokens if reasons else DEFAULT_MAX_TOKENS
    return min(max_tokens or default, settings.max_generation_tokens, context - length)


def submit_message(
    request: GenerationRequest,
    model: Model,
    tenant: Tenant,
    prompt: Prompt,
    *,
    seed: int,
    max_tokens: int,
    is_first: bool,
    **fields: Any,
) -> Submit:
    """Return the message for the first attempt of a sequence. ``is_first``: of those with the same
    prompt. ``fields`` are further fields of the message."""
    settings = model.settings
    return Submit(
        attempt=0,
        token_ids=prompt.token_ids,
        images=_image_parts(prompt),
        sampling=_sampling(request, model, settings, seed),
        max_tokens=max_tokens,
        stop_token_ids=_stop_token_ids(request, model, prompt),
        min_tokens=min(request.min_tokens or 0, max_tokens),
        priority=tenant.priority(request.priority),
        logprobs=request.num_logprobs,
        # All choices share the prompt.
        prompt_logprobs=_prompt_logprobs(request) if is_first else None,
        adapter=model.adapter,
        group=tenant.group,
        **fields,
    )


def _image_parts(prompt: Prompt) -> tuple[ImagePart, ...]:
    """Return the positions of the images of ``prompt``; the arrays of an image are sent with its
    first occurrence."""
    parts: list[ImagePart] = []
    sent: set[bytes] = set()
    for image, start in prompt.images:
        arrays = () if image.digest in sent else tuple(image.specs)
        sent.add(image.digest)
        length = len(image.expansion)
        parts.append(ImagePart(digest=image.digest, start=start, length=length, arrays=arrays))
    return tuple(parts)


def image_frames(prompt: Prompt) -> list[bytes | memoryview]:
    """Return the frames that go with the message: each array of each image, once."""
    images = {image.digest: image for image, _ in reversed(prompt.images)}
    distinct = dict.fromkeys(image.digest for image, _ in prompt.images)
    return [frame for digest in distinct for frame in images[digest].frames]


def salt_of(request: GenerationRequest, settings: Settings, tenant: Tenant) -> str:
    """Return the scope that separates the blocks of ``request`` from those of other tenants."""
    salt = request.cache_salt or ""
    # Names contain no slash, so that no client's salt can equal another tenant's scope.
    return f"{tenant.name}/{salt}" if settings.cache_salt_per_key else salt


def _prompt_logprobs(request: GenerationRequest) -> int | None:
    """Return how many alternatives are needed at each position of the prompt."""
    wanted = [request.prompt_logprobs]
    if request.echoes:
        wanted.append(request.num_logprobs)
    return max((count for count in wanted if count is not None), default=None)


def _stop_token_ids(request: GenerationRequest, model: Model, prompt: Prompt) -> list[int]:
    ids = set(request.stop_token_ids or ())
    if not request.ignore_eos:
        ids.update(model.hello.eos_token_ids, model.renderer.eos_token_ids, prompt.end_ids)
    return sorted(ids)


def _sampling(
    request: GenerationRequest, model: Model, settings: Settings, seed: int
) -> SamplingParams:
    """Take each parameter from the request, else from the flags, else from the model."""
    renderer = model.renderer
    defaults = renderer.sampling_defaults
    penalty, context = request.repetition

    def pick(asked: float | None, flag: float | None, default: float) -> float:
        return asked if asked is not None else flag if flag is not None else default

    top_k = max(0, int(pick(request.top_k, settings.top_k, defaults.top_k)))
    top_p = pick(request.top_p, settings.top_p, defaults.top_p)
    # The most likely token, whatever the noise, also if two are as likely.
    is_greedy = (top_k == 1 or not top_p) and not request.xtc_probability
    temperature = pick(request.temperature, settings.temperature, defaults.temperature)
    return SamplingParams(
        seed=seed,
        temperature=0.0 if is_greedy else temperature,
        top_p=top_p or 1.0,
        top_k=top_k,
        min_p=pick(request.min_p, settings.min_p, defaults.min_p),
        xtc_probability=request.xtc_probability or 0.0,
        xtc_threshold=0.1 if request.xtc_threshold is None else request.xtc_threshold,
        xtc_special_ids=renderer.xtc_special_ids if request.xtc_probability else [],
        repetition_penalty=penalty,
        repetition_context_size=context,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=list((request.logit_bias or {}).items()),
    )


def numbered_seed(seed: int, number: int) -> int:
    """Return 63 bits. The first choice keeps a small seed, so that increasing ``n`` only adds
    choices."""
    if number == 0:
        return seed & (2**63 - 1)
    digest = blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)
