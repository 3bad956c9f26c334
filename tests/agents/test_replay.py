"""Recorded sessions of agents, replayed on whole servers: their prefixes are found."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.serving import sessions
from bench.serving.agents import FLAGS, prompt_tokens, replay
from bench.serving.models import CONTEXT, template
from engine.model.demo import demo_model_path
from tests.agents.formats import FORMATS, Format
from tests.agents.model import make_actor
from tests.agents.scripts import PLAIN
from tests.e2e.server import serving
from tests.tiny_models import make_tiny

SHORT_REQUESTS = 9  # the main line, a sub-agent's, and the main line again
LEAST = 0.95
"""The least share that is found of what a prompt has in common with one before it."""
PAGE = 64  # tokens


def check(
    model: Path,
    ssd: Path,
    names: Sequence[str],
    requests: int | None = None,
    min_prompt: int = 0,
    unit: int = 1,
) -> None:
    """Play sessions on a server, and again after a restart: then all is on the SSD. Of prompts of
    less than ``min_prompt`` tokens nothing need be found, and of others whole numbers of ``unit``
    tokens."""
    played = {name: sessions.with_titles(sessions.read(name)[:requests]) for name in names}
    tokens = {name: prompt_tokens(model, requests) for name, requests in played.items()}
    flags = ("--ssd-cache-dir", str(ssd), "--ssd-policy", "write_through")
    for again in (False, True):
        with serving(model, *FLAGS, *flags) as server:
            for name in names:
                turns = replay(server.port, played[name], tokens[name], again=again)
                assert not [turn.error for turn in turns if turn.error]
                assert [turn.prompt for turn in turns] == list(map(len, tokens[name]))
                turns = [turn for turn in turns if turn.prompt >= min_prompt]
                assert turns
                whole = PAGE if again else unit  # files have whole pages
                least = [LEAST * (turn.known_in_blocks // whole * whole) for turn in turns]
                pairs = zip(turns, least, strict=True)
                assert not [turn for turn, tokens in pairs if turn.cached < tokens]
            if again:
                server.wait_metric("mlx_lm_server_cached_ssd_tokens_total")


def hybrid(path: Path) -> Path:
    """Make a tiny model with recurrent layers that has the demo model's tokens."""
    demo = demo_model_path()
    tokenizer = json.loads((demo / "tokenizer_config.json").read_text())
    tokenizer |= {"chat_template": template("qwen3"), "model_max_length": CONTEXT}
    vocabulary = json.loads((demo / "config.json").read_text())["vocab_size"]
    make_tiny("qwen3_next", path, vocab_size=vocabulary, max_position_embeddings=CONTEXT)
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    shutil.copy(demo / "tokenizer.json", path)
    return path


def test_the_prompts_of_agents_are_found_in_memory_and_on_ssd(tmp_path: Path) -> None:
    model = make_actor(tmp_path / "model", demo_model_path(), [], PLAIN, FORMATS[0])
    check(model, tmp_path / "ssd", ["codex"], SHORT_REQUESTS)


@pytest.mark.slow
@pytest.mark.skipif("REPLAY_TEST" not in os.environ, reason="only with REPLAY_TEST=1 (make agents)")
@pytest.mark.parametrize(
    ("format", "names"), [(FORMATS[0], sessions.names()), (FORMATS[1], ["codex"])]
)
def test_whole_sessions_of_agents_are_found(
    format: Format, names: list[str], tmp_path: Path
) -> None:
    model = make_actor(tmp_path / "model", demo_model_path(), [], PLAIN, format)
    check(model, tmp_path / "ssd", names)


@pytest.mark.slow
def test_a_hybrid_finds_a_session_up_to_its_snapshots(tmp_path: Path) -> None:
    # The state of a short prompt's only block is not kept for long, and states follow pages.
    check(hybrid(tmp_path / "model"), tmp_path / "ssd", ["opencode"], 9, min_prompt=64, unit=PAGE)
