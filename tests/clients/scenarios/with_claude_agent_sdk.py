"""Claude Agent SDK, which runs its own Claude Code.

Its requests have no limit or grammar that would let a small model do what is asked: the second
server's model does.
"""

import asyncio
import tempfile
from typing import Any

import harness as h
from claude_agent_sdk import (
    AssistantMessage,
    ClaudeAgentOptions,
    ClaudeSDKClient,
    ResultError,
    ResultMessage,
    StreamEvent,
    TextBlock,
    create_sdk_mcp_server,
    query,
    tool,
)

SETTINGS = {
    "ANTHROPIC_AUTH_TOKEN": h.KEY,
    "ANTHROPIC_API_KEY": "",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_MAX_RETRIES": "0",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "400",
}
HOME = tempfile.TemporaryDirectory(prefix="agent-sdk-", ignore_cleanup_errors=True)
ROME = "Rome it is."


async def told(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": h.weather(arguments["city"])}]}


weather = tool("weather", "Weather of a city", h.CITY_SCHEMA)(told)


def options(url: str = h.URL, **fields: Any) -> ClaudeAgentOptions:
    home = HOME.name
    env = {**SETTINGS, "ANTHROPIC_BASE_URL": url, "HOME": home, "CLAUDE_CONFIG_DIR": home}
    fields = {"model": h.MODEL, "system_prompt": "Answer briefly.", "tools": [], **fields}
    return ClaudeAgentOptions(cwd=home, env=env, setting_sources=[], **fields)


def asked(question: str, chosen: ClaudeAgentOptions) -> list[Any]:
    async def read() -> list[Any]:
        return [each async for each in query(prompt=question, options=chosen)]

    return asyncio.run(read())


def chat() -> None:
    *messages, result = asked("Think of Rome.", options(h.CALLER))
    said = [each for each in messages if isinstance(each, AssistantMessage)]
    texts = [block.text for each in said for block in each.content if isinstance(block, TextBlock)]
    h.check("".join(texts) == ROME and isinstance(result, ResultMessage), messages)
    h.check(not result.is_error and result.usage["output_tokens"] > 0, result)


def stream() -> None:
    messages = asked("Think of Rome.", options(h.CALLER, include_partial_messages=True))
    events = [each.event for each in messages if isinstance(each, StreamEvent)]
    parts = [each["delta"] for each in events if each["type"] == "content_block_delta"]
    h.check("".join(part.get("text", "") for part in parts) == ROME, events)


def tools() -> None:
    server = create_sdk_mcp_server("here", tools=[weather])
    chosen = options(
        h.CALLER, mcp_servers={"here": server}, allowed_tools=["mcp__here__weather"], max_turns=3
    )
    *messages, result = asked("Ask the tool for Rome's weather.", chosen)
    h.check("sunny in Rome" in str(messages), messages)
    h.check(result.result == "It is sunny.", result)


def structured() -> None:
    schema = {"type": "json_schema", "schema": h.CITY_SCHEMA}
    chosen = options(h.CALLER, output_format=schema, max_turns=4)
    *messages, result = asked("Name Rome in the schema.", chosen)
    h.check(result.structured_output == {"city": "Rome"}, messages[-3:])


def errors() -> None:
    error = h.failure(ResultError, asked, h.QUESTION, options(model="nobody"))
    h.check("may not exist" in str(error), error)


def cancel() -> None:
    async def interrupt() -> None:
        async with ClaudeSDKClient(options(include_partial_messages=True)) as client:
            await client.query(h.LONG)
            async for message in client.receive_response():
                if isinstance(message, StreamEvent) and message.event["type"] == "message_start":
                    await client.interrupt()

    before = h.aborts()
    asyncio.run(interrupt())
    h.check_aborted(before)


h.run(chat, stream, tools, structured, errors, cancel)
