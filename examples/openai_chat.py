"""A conversation of two turns over the Chat Completions API, streamed, with OpenAI's client.
Run: pip install openai && python examples/openai_chat.py (SERVER_URL, SERVER_KEY)"""

import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

client = OpenAI(
    base_url=os.environ.get("SERVER_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("SERVER_KEY", "none"),
)
model = client.models.list().data[0].id

messages: list[ChatCompletionMessageParam] = []
for question in ("What is the capital of France?", "And what is it known for?"):
    print(f"> {question}")
    messages.append({"role": "user", "content": question})
    with client.chat.completions.stream(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=60,
        stream_options={"include_usage": True},
    ) as events:
        for event in events:
            if event.type == "content.delta":
                print(event.delta, end="", flush=True)
    answer = events.get_final_completion()
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    # The second turn finds the first one in the prefix cache.
    if answer.usage and answer.usage.prompt_tokens_details:
        cached = answer.usage.prompt_tokens_details.cached_tokens
        print(f"\n({answer.usage.prompt_tokens} prompt tokens, {cached} of them cached)\n")
