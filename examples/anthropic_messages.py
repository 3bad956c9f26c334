"""A streamed answer over the Messages API, with Anthropic's client.
Run: pip install anthropic && python examples/anthropic_messages.py (SERVER_URL, SERVER_KEY)"""

import os

from anthropic import Anthropic

client = Anthropic(
    base_url=os.environ.get("SERVER_URL", "http://127.0.0.1:8000"),
    api_key=os.environ.get("SERVER_KEY", "none"),
)
model = client.models.list().data[0].id

with client.messages.stream(
    model=model,
    max_tokens=60,
    system="You answer in one short sentence.",
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    extra_body={"temperature": 0},  # newer releases of the client have no such argument
) as events:
    for text in events.text_stream:
        print(text, end="", flush=True)
    message = events.get_final_message()

usage = message.usage
print(f"\n({message.stop_reason}, {usage.input_tokens} tokens in, {usage.output_tokens} out)")
