"""Coding agents that show a picture to a model that was trained to name its colour."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.installing import binaries, install
from tests.agents.model import MODEL
from tests.agents.scripts import AGENTS, BEFORE, Agent
from tests.agents.trial import Trial
from tests.e2e.installing import NotInstalled
from tests.e2e.requests.naming_model import QUESTION, coloured, make_naming_model
from tests.e2e.server import Server, serving
from tests.vision_models import needs_mlx_vlm

needs_mlx_vlm()

TEMPLATE = (
    "{% for message in messages if message['role'] == 'user' %}"
    "{% set content = message['content'] %}"
    "{% if (('<image>' in content) if content is string"
    " else (content | selectattr('type', 'equalto', 'image') | list)) %}"
    "<|im_start|>user\n<image>QUESTION<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Leaves out what agents say beside the picture: the model knows one question."""
COLOURS = {"codex": "green", "opencode": "yellow"}
SHOWN = {
    "codex": lambda file: [
        *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("--image", file, "--", QUESTION),
    ],
    "opencode": lambda file: ["run", QUESTION, "--file", file],
}
"""How each agent is given a picture."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_naming_model(tmp_path_factory.mktemp("models") / "naming")
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = TEMPLATE.replace("QUESTION", QUESTION)
    path.write_text(json.dumps(config))
    with serving(model, "--no-ssd", "--served-model-name", MODEL) as running:
        yield running


@pytest.mark.timeout(300)
def test_codex_shows_a_picture_where_it_is_installed(
    pytestconfig: pytest.Config, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    (codex,) = (agent for agent in AGENTS if agent.name == "codex")
    places = [Path(found).parent] if (found := shutil.which(codex.name)) else []
    if hasattr(pytestconfig, "cache"):
        places.insert(0, binaries(codex, pytestconfig.cache.mkdir("agents")))
    for place in places:
        if (place / codex.name).exists():
            return check(codex, place, request.getfixturevalue("server"), tmp_path)
    pytest.skip("codex is not installed: `make test-slow` does it, once")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHOWN)
def test_agents_show_pictures(
    pytestconfig: pytest.Config, server: Server, tmp_path: Path, name: str
) -> None:
    if not hasattr(pytestconfig, "cache"):
        pytest.skip("there is no place where agents are installed")
    (agent,) = (agent for agent in AGENTS if agent.name == name)
    try:
        found = install(agent, pytestconfig.cache.mkdir("agents"))
    except NotInstalled as error:
        pytest.skip(f"{name} {error}")
    check(agent, found, server, tmp_path)


def check(agent: Agent, found: Path, server: Server, private: Path) -> None:
    trial = Trial(agent, found, private, server)
    trial.lay_out(BEFORE)
    colour = COLOURS[agent.name]
    file = private / "project" / f"{colour[0]}.png"
    coloured(colour, 3_000_000).save(file)
    code, printed = trial.work(server.url, SHOWN[agent.name](file.name))
    assert code == 0 and colour in printed, printed
