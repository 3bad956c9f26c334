"""Typed questions about a mail, answered with probabilities in one request, with OpenAI's client.
Run: pip install openai && python examples/decisions.py (SERVER_URL, SERVER_KEY)"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("SERVER_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("SERVER_KEY", "none"),
)
MAIL = "My card was charged twice for order 1822, and nobody has replied to my two letters."
TEAMS = {"billing": "payments and refunds", "shipping": "deliveries", "press": "journalists"}

decision = client.decisions.create(
    model=client.models.list().data[0].id,
    input=MAIL,
    questions=[
        {"type": "predicate", "instructions": "Is the writer angry?"},
        {
            "type": "choice",
            "instructions": "Which team handles this mail?",
            "choices": [{"value": name, "description": does} for name, does in TEAMS.items()],
        },
        {
            "type": "score",
            "instructions": "How urgent is it?",
            "levels": [{"label": "can wait"}, {"label": "this week"}, {"label": "today"}],
        },
    ],
    extra_body={"samples": 3},  # of this server: averages over orders of the options
)
print(f"> {MAIL}")
for answer in decision.answers:
    if answer.type == "predicate":
        print(f"angry: {answer.probability:.2f}")
    elif answer.type == "choice":
        print(f"team: {answer.choice} (confidence {answer.confidence:.2f})")
    elif answer.type == "score":
        print(f"urgency: {answer.score:.2f} of 2 (confidence {answer.confidence:.2f})")
print(f"({decision.usage.input_tokens} tokens read, {decision.usage.output_tokens} written)")
