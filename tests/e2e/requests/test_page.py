"""The status and chat page in a real browser, before a real server with a tiny model.

Needs Chromium (``CHROMIUM`` names it, else it is looked for) and the package playwright. The check
of accessibility needs axe-core as well: ``AXE_CORE`` names its ``axe.min.js``.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.requests.naming_model import QUESTION, in_png, make_naming_model
from tests.e2e.server import Server, serving
from tests.tiny_models import CHAT_TEMPLATE
from tests.vision_models import needs_mlx_vlm

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
AXE_CORE = os.environ.get("AXE_CORE")
KEY, METRICS_KEY = "sesame", "scrape"
PHONE = {"width": 390, "height": 844}

if CHROMIUM is None:
    pytest.skip("there is no Chromium", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


@pytest.fixture(scope="module")
def server(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    flags = ("--api-key", KEY, "--metrics-key", METRICS_KEY, "--served-model-name", "tiny")
    template = CHAT_TEMPLATE + "{% if enable_thinking %}<think>\n{% endif %}"
    reasoning = (
        *("--reasoning-parser", "think", "--chat-template", template),
        *("--chat-template-args", '{"enable_thinking": false}'),
    )
    with serving(tiny_model("llama"), *flags, *reasoning) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(server: Server, browser: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that opens the page, with keys; nothing may be wrong in the console."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def open_(*, keys: bool = True, port: int | None = None, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": 1280, "height": 860}, **options)
        contexts.append(context)
        if keys:
            stored = {"api-key": KEY, "metrics-key": METRICS_KEY}
            for name, key in stored.items():
                context.add_init_script(f"sessionStorage.setItem('{name}', '{key}')")
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda one: complaints.append(one.text) if one.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"http://127.0.0.1:{port or server.port}/")
        return page

    yield open_
    for context in contexts:
        context.close()
    # An answer with an error status is no mistake of the page; the browser names each of them.
    assert [one for one in complaints if not one.startswith("Failed to load resource")] == []


def ask(page: Any, text: str, *, wait: bool = True) -> None:
    page.get_by_role("tab", name="Chat").click()
    page.get_by_label("Model").locator("option", has_text="tiny").first.wait_for(state="attached")
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    if wait:
        wait_for_answers(page)


def wait_for_answers(page: Any) -> None:
    page.locator("#stop").wait_for(state="hidden")


def setting(page: Any, label: str) -> Any:
    page.get_by_role("tab", name="Chat").click()
    return page.get_by_label(label, exact=True)


def figure(page: Any, name: str) -> Any:
    return page.locator(".tile", has=page.get_by_role("heading", name=name)).locator(".figure")


@contextmanager
def generating(server: Server) -> Iterator[None]:
    """Keep one request running that takes longer than what is tried meanwhile."""
    body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        yield


def test_questions_are_answered_with_their_probabilities(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.get_by_role("tab", name="Decide").click()
    page.get_by_role("button", name="Decide").click()
    page.get_by_role("alert").filter(has_text="there must be 1 to 400").wait_for()
    page.get_by_label("Text", exact=True).fill("Charged twice.")
    page.get_by_label("Question", exact=True).fill("Is the writer angry?")
    page.get_by_role("button", name="Add question").click()
    page.get_by_label("Question", exact=True).last.fill("Who handles it?")
    page.get_by_label("Kind").last.select_option("choice")
    page.get_by_label("Options").last.fill("billing, shipping")
    page.get_by_role("button", name="Decide").click()
    page.get_by_text("confidence").wait_for()
    first, second = (each.inner_text().split() for each in page.locator("output").all())
    assert first[0] == "yes" and abs(float(first[1]) + float(first[3]) - 1) < 0.002
    assert (second[0], second[2]) == ("billing", "shipping")


def test_it_asks_for_keys_and_keeps_them_in_the_tab(open_page: Callable[..., Any]) -> None:
    page = open_page(keys=False)
    page.get_by_role("button", name="Enter a key").click()
    page.get_by_label("API key").fill(KEY)
    page.get_by_label("Metrics key").fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Enter a key").click()
    page.get_by_label("Metrics key").fill(METRICS_KEY)
    page.keyboard.press("Enter")
    page.locator(".model").wait_for()
    assert page.locator("#health").inner_text() == "ok"
    ask(page, "hello")
    assert page.evaluate("localStorage.length") == 0
    assert KEY not in page.evaluate("document.cookie") + page.url
    page.reload()
    page.locator("#chat").wait_for()
    page.get_by_role("tab", name="Status").click()
    page.locator(".model").wait_for()
    other = open_page(keys=False)
    other.get_by_role("button", name="Enter a key").wait_for()


def test_figures_move_under_load(server: Server, open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.locator(".engines tbody tr").wait_for()
    moving = figure(page, "Tokens/s").filter(has_text=re.compile(r"[1-9]"))
    while moving.count() == 0:
        with generating(server):
            page.wait_for_timeout(1500)
    row = page.locator(".engines tbody tr")
    assert row.locator("td").first.inner_text() == "engine-0"
    assert row.get_by_text("ready").count() == 1
    assert "M" in page.locator(".plot .line-0").first.get_attribute("d")


def test_an_answer_streams_and_is_told_of(open_page: Callable[..., Any]) -> None:
    page = open_page()
    setting(page, "Max tokens").fill("40")
    setting(page, "Show log-probabilities").check()
    ask(page, "hello")
    stats = page.locator(".stats").last.inner_text()
    for part in ("first token", "tok/s", "tokens", "cached", "seed"):
        assert part in stats
    page.get_by_role("button", name="Log-probabilities", exact=True).click()
    tokens = page.locator(".tokens button")
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".alternatives tr").count() >= 5
    assert tokens.nth(1).get_attribute("aria-pressed") == "true"
    page.get_by_role("button", name="Regenerate").click()
    wait_for_answers(page)
    assert page.locator(".answer").count() == 1


def test_reasoning_is_folded(open_page: Callable[..., Any]) -> None:
    page = open_page()
    setting(page, "Reasoning").select_option("on")
    setting(page, "Max reasoning tokens").fill("8")
    setting(page, "Max tokens").fill("40")
    ask(page, "hello")
    summary = page.locator(".reasoning summary")
    assert re.fullmatch(r"Reasoning, .+, \d+ tokens", summary.inner_text())
    thought = page.locator(".reasoning > div")
    assert not thought.is_visible()
    summary.click()
    assert thought.is_visible() and thought.inner_text()
    assert page.locator(".text").inner_text()


def test_an_answer_is_stopped_and_the_next_one_goes_on(open_page: Callable[..., Any]) -> None:
    page = open_page()
    setting(page, "Max tokens").fill("1900")
    ask(page, "hello", wait=False)
    page.locator(".text:not(:empty)").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("stopped", exact=True).wait_for()
    assert page.get_by_role("button", name="Send").is_enabled()
    setting(page, "Max tokens").fill("8")
    ask(page, "again")
    assert page.locator(".question").count() == 2


def test_a_call_is_shown_and_answered(open_page: Callable[..., Any]) -> None:
    page = open_page()
    setting(page, "Max tokens").fill("400")
    page.get_by_role("button", name="Insert example: Tools (JSON)").click()
    (tool,) = json.loads(setting(page, "Tools (JSON)").input_value())
    tool["function"]["parameters"]["properties"]["city"] = {"enum": ["Paris"]}  # soon written
    setting(page, "Tools (JSON)").fill(json.dumps([tool]))
    setting(page, "Tool choice").select_option("required")
    ask(page, "the weather")
    call = page.locator(".call").first
    assert call.locator("code").inner_text() == "get_weather"
    assert '"city"' in call.locator("pre").inner_text()
    for result in page.get_by_placeholder("result of the tool").all():
        result.fill("12 degrees")
    setting(page, "Tool choice").select_option("none")
    page.get_by_role("button", name=re.compile("Send results?")).click()
    wait_for_answers(page)
    assert page.locator(".answer").count() == 2 and page.locator(".question").count() == 1
    assert page.locator(".failure:visible").count() == 0


GIVE = """([kind, data]) => {
  const bytes = Uint8Array.from(atob(data), one => one.charCodeAt(0));
  const files = new DataTransfer();
  files.items.add(new File([bytes], "a.png", { type: "image/png" }));
  const options = { bubbles: true, cancelable: true };
  const [id, event] = kind === "paste"
    ? ["message", new ClipboardEvent("paste", { clipboardData: files, ...options })]
    : ["chat", new DragEvent("drop", { dataTransfer: files, ...options })];
  document.getElementById(id).dispatchEvent(event);
}"""


def test_pictures_are_chosen_pasted_and_dropped(
    open_page: Callable[..., Any], tmp_path: Path
) -> None:
    needs_mlx_vlm()
    model = make_naming_model(tmp_path / "naming")
    with serving(model, "--no-ssd", "--served-model-name", "tiny") as seeing:
        page = open_page(keys=False, port=seeing.port)
        setting(page, "Temperature").fill("0")
        setting(page, "Max tokens").fill("8")
        page.get_by_role("button", name="Add picture").wait_for()
        for number, (kind, colour) in enumerate(
            (("choose", "green"), ("paste", "red"), ("drop", "blue"))
        ):
            page.get_by_role("button", name="New chat").click()
            data = in_png(colour, 4_000_000 + number)
            if kind == "choose":
                file = {"name": "a.png", "mimeType": "image/png", "buffer": data}
                page.locator("#picture-files").set_input_files(file)
            else:
                page.evaluate(GIVE, [kind, base64.b64encode(data).decode()])
            page.locator("#pictures img").wait_for()
            ask(page, QUESTION)
            assert page.locator(".text").last.inner_text() == colour
            assert page.locator(".question img").count() == 1
        page.evaluate(GIVE, ["paste", base64.b64encode(data).decode()])
        page.get_by_role("button", name="Remove picture 1").click()
        assert page.locator("#pictures img").count() == 0


def test_errors_and_bad_settings_are_shown(open_page: Callable[..., Any]) -> None:
    page = open_page()
    setting(page, "Max tokens").fill("100000000")
    ask(page, "hello")
    assert "max_tokens" in page.locator(".failure").inner_text()
    setting(page, "Max tokens").fill("300")
    setting(page, "Response JSON schema").fill("{")
    page.get_by_label("Message", exact=True).fill("x")
    page.keyboard.press("Enter")
    assert page.locator("#setting-schema-error").is_visible()
    assert page.locator(".question").count() == 1  # it was not sent
    page.get_by_role("button", name="Insert example: Response JSON schema").click()
    ask(page, "somebody")
    assert page.locator(".text").last.inner_text().startswith("{")


def test_models_answer_side_by_side(open_page: Callable[..., Any]) -> None:
    page = open_page()
    setting(page, "Max tokens").fill("8")
    page.get_by_role("button", name="Compare models").click()
    ask(page, "hello")
    assert page.locator('.pane .answer[aria-busy="false"]').count() == 2
    page.get_by_role("button", name="Edit").first.click()
    assert page.get_by_label("Message", exact=True).input_value() == "hello"
    assert page.locator(".question").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", ["desktop", "phone"])
def test_it_fits_and_is_accessible(open_page: Callable[..., Any], scheme: str, width: str) -> None:
    page = open_page(color_scheme=scheme, bypass_csp=True)  # axe-core is put into it
    if width == "phone":
        page.set_viewport_size(PHONE)
    page.locator(".engines tbody tr").wait_for()
    check_view(page)
    ask(page, "hello")
    if width == "phone":
        page.get_by_text("Settings", exact=True).click()
    check_view(page)


def check_view(page: Any) -> None:
    """Nothing is wider than the window, and axe-core finds nothing."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    if AXE_CORE is None:
        return
    page.evaluate(Path(AXE_CORE).read_text(encoding="utf-8"))
    found = page.evaluate("axe.run()")
    assert found["passes"]
    assert [
        (one["id"], [node["html"] for node in one["nodes"]]) for one in found["violations"]
    ] == []
