"""A loop of tool calls: the model calls, the program runs the tool, the model gets the result.
Run: pip install openai && python examples/tools.py (SERVER_URL, SERVER_KEY)"""

import json
import os
from typing import Any

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("SERVER_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("SERVER_KEY", "none"),
)
model = client.models.list().data[0].id


def weather(city: str) -> str:
    return {"Paris": "sunny, 21 degrees", "Rome": "rainy, 17 degrees"}.get(city, "unknown")


city = {"type": "string", "enum": ["Paris", "Rome"]}
parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
function = {"name": "weather", "description": "Weather of a city", "parameters": parameters}
fields: Any = {"model": model, "tools": [{"type": "function", "function": function}]}

messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
# A grammar forces the first answer to be a call, whatever the model is. The last one is text.
for choice in ("required", "auto", "none"):
    answer = client.chat.completions.create(
        messages=messages, tool_choice=choice, temperature=0, max_tokens=60, **fields
    )
    message = answer.choices[0].message
    messages.append(message)
    for call in message.tool_calls or ():
        result = weather(json.loads(call.function.arguments).get("city"))
        print(f"{call.function.name}({call.function.arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not message.tool_calls:
        print(message.content)
        break
