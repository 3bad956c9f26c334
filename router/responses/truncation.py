"""Truncation of long conversations at their beginning."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from router.schemas.requests import ChatRequest


async def truncate_to_fit(
    prompts: list[list[int]],
    request: ChatRequest,
    limit: int,
    render: Callable[[ChatRequest], Awaitable[list[list[int]]]],
) -> list[list[int]]:
    """Return the prompt of ``request`` without its oldest turns, so that it has at most ``limit``
    tokens. ``prompts`` has the prompt with all turns, and ``render`` returns that of a request.

    As few turns as possible are dropped. A first message of the system's is kept. If the last
    turn alone is too long, ``prompts`` are returned.
    """
    if len(prompts[0]) <= limit:
        return prompts
    messages = request.messages
    system = messages[:1] if messages[0].role == "system" else []
    turn_starts = [index for index, message in enumerate(messages) if message.role == "user"][1:]
    fitting = prompts
    low, high = 0, len(turn_starts)
    while low < high:
        middle = (low + high) // 2
        kept = system + messages[turn_starts[middle] :]
        shorter = await render(replace(request, messages=kept))
        if len(shorter[0]) <= limit:
            fitting, high = shorter, middle
        else:
            low = middle + 1
    return fitting
