"""A tiny model that calls a tool, for clients that cannot require a call. It also reasons."""

from __future__ import annotations

from pathlib import Path

from engine.model.demo import demo_model_path
from tests.agents.formats import Call, Format, Step
from tests.agents.model import Script, make_actor


def _call(name: str) -> Step:
    return Step(calls=(Call(name, {"city": "Rome"}),))


def make_caller(path: Path) -> Path:
    """Write the model into the directory ``path``. Return ``path``."""
    scripts = [
        Script("the weather in Rome", [_call("weather"), Step(text="It is sunny.")]),
        Script("Rome's weather", [_call("mcp__here__weather"), Step(text="It is sunny.")]),
        *(
            Script(
                "Think of Rome",
                [Step(text="Rome it is.", reasoning="It is in Italy.")],
                with_tools=with_tools,
            )
            for with_tools in (False, True)
        ),
        Script("in the schema", [_call("StructuredOutput"), Step(text="It is Rome.")]),
    ]
    return make_actor(path, demo_model_path(), scripts, "Ask for the weather.", Format())
