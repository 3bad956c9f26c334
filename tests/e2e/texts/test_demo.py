"""The embedded demo model through the real processes, compared with mlx-lm itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server, at_once, cached_tokens, content_of, serving
from tests.oracle import Oracle, oracle

MAX_TOKENS = 12
HEAD = (
    "You are a careful assistant. You answer in one short sentence, without lists, and you "
    "say so when you do not know something. Here is what you have to work with today: "
)
QUESTIONS = [
    "What is the capital of France?",
    "Name a colour.",
    "1 + 1 =",
    "Écris une phrase en français.",
    "日本の首都はどこですか。",
    "Write a line of Python that prints hello.",
    "Say 🙂 twice.",
    "x",
]
EXAMPLES = Path(__file__).parents[3] / "examples"
EXPECTED_OUTPUT = {  # regular expressions
    "anthropic_messages.py": r"capital of France is Paris\.\n\(end_turn, \d+ tokens in, \d+ out\)",
    "curl.sh": r'(?s)"id":"demo".*capital of France is Paris\..*"content":" Paris".*data: \[DONE\]',
    "decisions.py": r"angry: 0\.\d+\nteam: \w+ \(.+\)\nurgency: .+\n\(\d+ tokens read, 0 ",
    "openai_chat.py": r"(?s)is Paris\.\n.*known for\?\n.+\n\(\d+ prompt tokens, [1-9]\d* of them",
    "structured_output.py": r"City\(name='.+', country='.+'\)\nIn Europe: (yes|no|unknown)\n",
    "tools.py": r'weather\(\{"city": "(Paris|Rome)"\}\) -> (sunny|rainy), .+\n.+',
}


@pytest.fixture(scope="module")
def truth(demo_model: Path) -> Oracle:
    return oracle(demo_model)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--kv-bits", "16", "--served-model-name", "demo")
    with serving("demo-fp32", *flags, _MLX_LM_SERVER_CHECK_INTEGRITY="1") as running:
        yield running


@pytest.fixture(scope="module")
def prompts(truth: Oracle) -> list[list[int]]:
    """Return 12 prompts: chats, shared heads, and lengths around multiples of the block size."""
    chats = [truth.chat(question) for question in QUESTIONS[3:]]
    shared = [truth.chat(HEAD + question) for question in QUESTIONS[:3]]
    words = truth.tokenizer.encode(HEAD * 3)
    lengths = [words[:n] for n in (16, 17, 47, 1)]
    found = [*chats, *shared, *lengths]
    assert len(found) == 12
    return found


def test_the_capital_of_france_is_paris(server: Server) -> None:
    answer = server.chat("What is the capital of France?")
    assert "Paris" in content_of(answer)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert cached_tokens(answer) == 0


@pytest.mark.slow
def test_texts_are_mlx_lms_one_by_one_and_together_whatever_is_cached(
    server: Server, truth: Oracle, prompts: list[list[int]]
) -> None:
    def answer(prompt: list[int]) -> tuple[str, list[float]]:
        choice = server.complete(prompt, MAX_TOKENS, logprobs=1)["choices"][0]
        return choice["text"], choice["logprobs"]["token_logprobs"]

    one_by_one = range(3, len(prompts), 3)
    alone = [answer(prompts[number]) for number in one_by_one]
    together = at_once(answer, prompts)
    for prompt, (text, _) in zip(prompts, together, strict=True):
        truth.check(prompt, MAX_TOKENS, text)
    for number, (text, scores) in zip(one_by_one, alone, strict=True):
        truth.check(prompts[number], MAX_TOKENS, text)
        if sys.platform == "linux":
            assert (text, scores) == together[number]


@pytest.mark.slow
def test_a_conversation_computes_only_its_new_tokens(server: Server, truth: Oracle) -> None:
    texts: list[str] = []
    computed: list[int] = []
    for turn in range(4):
        texts.append(f"Turn {turn}: tell me one more thing about the number {turn + 3}.")
        prompt = truth.chat(*texts)
        roles = ("user", "assistant") * len(texts)
        messages = [
            {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
        ]
        fields = {"messages": messages, "max_tokens": 12, "temperature": 0}
        answer = server.answer("/v1/chat/completions", **fields)
        text = content_of(answer)
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        shared = 0
        while shared < min(len(prompt) - 1, len(computed)) and prompt[shared] == computed[shared]:
            shared += 1
        cached = cached_tokens(answer)
        assert cached >= shared - 15, f"turn {turn}: {cached} of {shared} shared tokens"
        assert turn == 0 or cached > 0
        truth.check(prompt, 12, text)
        computed = prompt + truth.tokens(prompt, 12)[:-1]
        texts.append(text)


@pytest.mark.parametrize("example", sorted(p.name for p in EXAMPLES.iterdir() if p.suffix != ".md"))
def test_an_example_prints_the_expected_output(server: Server, example: str) -> None:
    shell = example.endswith(".sh")
    if shell and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    result = subprocess.run(
        ["bash" if shell else sys.executable, str(EXAMPLES / example)],
        env={**os.environ, "SERVER_URL": server.url},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(EXPECTED_OUTPUT[example], result.stdout), result.stdout
