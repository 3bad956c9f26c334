"""An answer that matches a JSON schema, and one that is one of three words.
Run: pip install openai && python examples/structured_output.py (SERVER_URL, SERVER_KEY)"""

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field

client = OpenAI(
    base_url=os.environ.get("SERVER_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("SERVER_KEY", "none"),
)
model = client.models.list().data[0].id


class City(BaseModel):
    name: str = Field(max_length=30)
    country: str = Field(max_length=30)
    continent: Literal["Africa", "America", "Asia", "Australia", "Europe"]


# The schema is enforced by a grammar: whatever the model is, the answer parses.
parsed = client.chat.completions.parse(
    model=model,
    messages=[{"role": "user", "content": "Describe Paris."}],
    response_format=City,
    temperature=0,
)
print(repr(parsed.choices[0].message.parsed))

# vLLM's extension: a choice, a regular expression or a Lark grammar.
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Is Paris in Europe?"}],
    temperature=0,
    extra_body={"structured_outputs": {"choice": ["yes", "no", "unknown"]}},
)
print("In Europe:", answer.choices[0].message.content)
