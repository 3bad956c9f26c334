"""Long conversations, cut at their beginning until they fit."""

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
    """``prompts`` of ``request`` if they have at most ``limit`` tokens, else those of the
    longest end of it that has: without its first turns, but with what the system says
    first. Where even the last turn is too long, all of it."""
    if len(prompts[0]) <= limit:
        return prompts
    messages = request.messages
    system = messages[:1] if messages[0].role == "system" else []
    starts = [index for index, message in enumerate(messages) if message.role == "user"][1:]
    fitting = prompts
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        tried = await render(replace(request, messages=system + messages[starts[middle] :]))
        if len(tried[0]) <= limit:
            fitting, high = tried, middle
        else:
            low = middle + 1
    return fitting
