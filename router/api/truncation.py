"""Truncation of long conversations at the beginning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import msgspec
from msgspec.structs import replace

from router.schemas.conversation import ChatMessage
from router.schemas.requests import ChatRequest
from router.tokens.image_prompts import Prompt


def truncate_to_fit(
    prompts: list[Prompt],
    request: ChatRequest,
    limit: int,
    render: Callable[[ChatRequest], list[Prompt]],
) -> list[Prompt]:
    """Return the prompt of ``request`` without its oldest turns, so that it has at most ``limit``
    tokens. ``prompts`` has the prompt with all turns; ``render`` returns the prompt of a request.

    As few turns as possible are dropped. A system message at the start is kept. If the last turn
    alone is too long, ``prompts`` are returned.
    """
    length = len(prompts[0].token_ids)
    if length <= limit:
        return prompts
    messages = request.messages
    system = messages[:1] if messages[0].role == "system" else []
    turn_starts = [index for index, message in enumerate(messages) if message.role == "user"][1:]
    fitting = prompts
    low, high = 0, len(turn_starts)
    guess = _first_guess(messages, turn_starts, limit / length)
    step = 1
    while low < high:
        kept = system + messages[turn_starts[guess] :]
        shorter = render(replace(request, messages=kept))
        # The estimate is good, so the search starts there and widens in growing steps until it has
        # both bounds: each rendering takes as long as a request.
        if len(shorter[0].token_ids) <= limit:
            fitting, high = shorter, guess
            guess = max(low, guess - step)
        else:
            low = guess + 1
            guess = min(high - 1, guess + step)
        if low > 0 and high < len(turn_starts):
            guess = (low + high) // 2
        step *= 2
    return fitting


def _first_guess(messages: Sequence[ChatMessage], turn_starts: Sequence[int], share: float) -> int:
    """Return the one of ``turn_starts`` that leaves about ``share`` of the text of ``messages``."""
    # An image counts as a few characters, which is accurate enough to start the search.
    encode = msgspec.json.Encoder(enc_hook=lambda _: None).encode
    sizes = list(accumulate((len(encode(each)) for each in messages), initial=0))
    wanted = sizes[-1] * (1 - share)
    found = (number for number, start in enumerate(turn_starts) if sizes[start] >= wanted)
    return next(found, max(0, len(turn_starts) - 1))
