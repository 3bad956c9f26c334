"""An MCP server with many tools, on stdin and stdout: one of them tells a secret.

It is run as a script by agents, and imports nothing but the standard library.
"""

from __future__ import annotations

import json
import sys
from typing import Any

COUNT = 60
PROTOCOL = "2025-06-18"
SECRET = "seventeen red herons"
NEEDED, PARAMETER = "heron_census", "lake_with_herons"
_TOPICS = ("weather", "parcel", "invoice", "library", "train", "garden", "museum", "harbour")


def tools() -> list[dict[str, Any]]:
    """Return `COUNT` tools."""
    others = (
        (f"{_TOPICS[number % len(_TOPICS)]}_{number}", f"Looks up entry {number}.", "entry")
        for number in range(COUNT - 1)
    )
    return [
        {
            "name": name,
            "description": text,
            "inputSchema": {
                "type": "object",
                "properties": {field: {"type": "string"}},
                "required": [field],
            },
        }
        for name, text, field in (*others, (NEEDED, "Counts the herons of a lake.", PARAMETER))
    ]


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    match method:
        case "initialize":
            about = {"name": "many-tools", "version": "1.0.0"}
            version = params.get("protocolVersion", PROTOCOL)
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
        case "tools/list":
            return {"tools": tools()}
        case "tools/call":
            said = SECRET if params["name"] == NEEDED else "nothing"
            return {"content": [{"type": "text", "text": said}], "isError": False}
    return {}


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message and "method" in message:
            result = answer(message["method"], message.get("params") or {})
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}))
            sys.stdout.write("\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
