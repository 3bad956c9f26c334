"""Chat templates run in processes of their own, with limits."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from router.errors import ContextLengthExceeded, InvalidRequest, Unavailable
from router.schemas.conversation import ChatMessage, ContentPart, FunctionCall, ToolCall
from router.schemas.images import ImageContent, ModelImage
from router.tokens.rendering import Renderer
from router.tokens.template_processes import TemplateProcesses
from shared.wire import Vision
from tests.router.chat_tokenizer import write_chat_tokenizer
from tests.router.conftest import eventually
from tests.router.tokens.template_table import DIRECTORY, NAMES, TOOL
from tests.router.tokens.test_fitting import CONVERSATIONS

HI = ChatMessage("user", "hi")
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = (
    "{% set n = namespace(s='ab') %}{% for a in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}"
)
ONE_CALL = "{{ 10 ** (10 ** 9) }}"
WRITES = "{% for a in range(99999) %}{{ 'a' * 99 }}{% endfor %}"
ON_DEMAND = (
    "{% if messages[0].content == 'hang' %}" + LOOPS + "{% endif %}{{ messages[0].content }}"
)
QUADRATIC = "{% for m in messages %}{% for n in messages %}{% endfor %}{{ m.content }};{% endfor %}"


@pytest.fixture(scope="module")
def processes() -> Iterator[TemplateProcesses]:
    processes = TemplateProcesses()
    processes.start()
    yield processes
    processes.close()
    assert not processes.pids


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.tokens.template_processes.TIME_LIMIT_S", 0.5)


def load(
    directory: Path, template: str, processes: TemplateProcesses | None, **more: Any
) -> Renderer:
    directory.mkdir(exist_ok=True)
    write_chat_tokenizer(directory)
    loading = Renderer.load(
        directory,
        tokenizer_options={},
        chat_template=template,
        template_args={},
        processes=processes,
        **more,
    )
    return asyncio.run(loading)


def shown(renderer: Renderer, *messages: ChatMessage, **args: Any) -> str:
    tokens = renderer.render_chat(messages, [], args).token_ids
    return renderer.decode(tokens)


@pytest.mark.parametrize("name", NAMES)
def test_a_process_renders_what_the_template_renders_here(
    name: str, processes: TemplateProcesses, tmp_path: Path
) -> None:
    template = (DIRECTORY / f"{name}.jinja").read_text(encoding="utf-8")
    apart, here = (load(tmp_path, template, each) for each in (processes, None))
    for messages in CONVERSATIONS:
        for tools in ([], [TOOL]):
            for args in ({}, {"enable_thinking": False}):
                found = [each.render_chat(messages, tools, args) for each in (apart, here)]
                assert found[0] == found[1]


def test_images_keep_their_order_and_are_not_sent(
    processes: TemplateProcesses, tmp_path: Path
) -> None:
    vision = Vision(model_type="x", placeholder_id=3, image_token_id=3, placeholder="<tool_call>")
    renderer = load(
        tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}", processes, vision=vision
    )
    images = [ModelImage(bytes([number]) * 32, [3], (), ()) for number in range(2)]
    parts: list[ContentPart] = [ImageContent(type="image", image=each) for each in images]
    placeholder_id = renderer.encode("<tool_call>")[-1]
    renderer.vision = vision = Vision(
        model_type="x",
        placeholder_id=placeholder_id,
        image_token_id=placeholder_id,
        placeholder="<tool_call>",
    )
    prompt = renderer.render_chat(
        [ChatMessage("user", [parts[1], ContentPart("text", "x"), parts[0]])], [], {}
    )
    assert [each.image for each in prompt.images] == [images[1], images[0]]


def test_values_of_any_size_reach_the_template(
    processes: TemplateProcesses, tmp_path: Path
) -> None:
    renderer = load(tmp_path, "{{ n }} {{ t }}", processes)
    assert shown(renderer, HI, n=2**80, t="ü\U0001f600") == f"{2**80} ü\U0001f600"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LOOPS, "processor time"),
        (DOUBLES, "memory"),
        (WRITES + WRITES, "writes many times"),
    ],
)
def test_a_template_without_bounds_is_refused_and_the_next_one_is_rendered(
    template: str,
    message: str,
    processes: TemplateProcesses,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wild = load(tmp_path / "wild", template, processes)
    tame = load(tmp_path / "tame", "{{ messages[0].content }}", processes)
    with pytest.raises(InvalidRequest, match=f"chat template .*{message}") as raised:
        wild.render_chat([HI], [], {})
    assert raised.value.code == "template_limit" and raised.value.param == "messages"
    assert shown(tame, HI) == "hi"
    tried = len(caplog.records)
    with pytest.raises(InvalidRequest, match=message):
        wild.render_chat([HI], [], {})
    assert len(caplog.records) == tried, "it was tried again"


@pytest.mark.usefixtures("brief")
def test_a_template_that_hangs_inside_one_call_is_killed(
    processes: TemplateProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.tokens.template_processes.WALL_LIMIT_S", 2)
    wild = load(tmp_path / "wild", ONE_CALL, processes)
    with pytest.raises((InvalidRequest, Unavailable)):
        wild.render_chat([HI], [], {})
    assert shown(load(tmp_path / "tame", "{{ messages[0].content }}", processes), HI) == "hi"


@pytest.mark.usefixtures("brief")
def test_others_use_a_template_that_one_conversation_takes_too_far(
    processes: TemplateProcesses, tmp_path: Path
) -> None:
    renderer = load(tmp_path, QUADRATIC, processes)
    with pytest.raises(InvalidRequest, match="processor time"):
        renderer.render_chat([ChatMessage("user", "")] * 20_000, [], {})
    assert shown(renderer, HI) == "hi;"


def test_conversations_that_cannot_fit_are_not_rendered(
    processes: TemplateProcesses, tmp_path: Path
) -> None:
    template = (DIRECTORY / "gpt-oss.jinja").read_text(encoding="utf-8")
    renderer = load(tmp_path, template, processes)
    called = ChatMessage("assistant", "", tool_calls=[ToolCall(FunctionCall("f", "{}"), id="a")])

    def check(length: int) -> None:
        if length > 100_000:
            raise ContextLengthExceeded(str(length))

    began = time.monotonic()
    with pytest.raises(ContextLengthExceeded) as raised:
        renderer.render_chat(
            [called] * 10_900 + [ChatMessage("user", "")] * 13_300, [], {}, check_length=check
        )
    assert time.monotonic() - began < 2
    assert int(str(raised.value)) > 100_000
    few = [HI, called, ChatMessage("tool", "", tool_call_id="a")] * 3
    least: list[int] = []
    tokens = renderer.render_chat(few, [], {}, check_length=least.append).token_ids
    assert len(few) < least[0] <= len(tokens)


def test_a_lost_process_is_replaced(processes: TemplateProcesses, tmp_path: Path) -> None:
    renderer = load(tmp_path, "{{ messages[0].content }}", processes)
    for pid in processes.pids:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: shown(renderer, HI) == "hi" and len(processes.pids) >= 2)


def test_a_burst_of_chats_starts_no_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("router.tokens.template_processes._SPARE_AFTER_S", 60)
    own = TemplateProcesses()
    own.start()
    try:
        renderer, started = load(tmp_path, "{{ messages[0].content }}", own), set(own.pids)
        with ThreadPoolExecutor(8) as pool:
            texts = [*pool.map(lambda _: shown(renderer, HI), range(32))]
        assert texts == ["hi"] * 32
        assert len(started) == 2 and set(own.pids) == started
    finally:
        own.close()


def test_while_all_are_busy_another_process_renders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for limit in ("TIME_LIMIT_S", "WALL_LIMIT_S"):
        monkeypatch.setattr(f"router.tokens.template_processes.{limit}", 60)
    own = TemplateProcesses()
    try:
        renderer = load(tmp_path, ON_DEMAND, own)
        with ThreadPoolExecutor(2) as pool:
            hanging = [ChatMessage("user", "hang")]
            busy = [pool.submit(renderer.render_chat, hanging, [], {}) for _ in range(2)]
            eventually(lambda: len(own.pids) == 3)
            assert shown(renderer, HI) == "hi"
            assert not any(each.done() for each in busy)
            own.close()
            assert all(each.exception(30) is not None for each in busy)
    finally:
        own.close()


def test_processes_have_no_secrets(
    processes: TemplateProcesses, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    own = TemplateProcesses()
    try:
        assert shown(load(tmp_path, "{{ messages[0].content }}", own), HI) == "hi"
        for pid in own.pids:
            assert b"hf_secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    finally:
        own.close()


def test_closing_ends_a_rendering(tmp_path: Path) -> None:
    own = TemplateProcesses()
    renderer = load(tmp_path, ON_DEMAND, own)
    raised: list[BaseException] = []

    def hang() -> None:
        try:
            renderer.render_chat([ChatMessage("user", "hang")], [], {})
        except (InvalidRequest, Unavailable) as error:
            raised.append(error)

    thread = threading.Thread(target=hang)
    thread.start()
    time.sleep(0.3)
    own.close()
    thread.join(30)
    assert raised and not own.pids
