"""Open WebUI itself, used in Chromium. It asks by Ollama's API and by OpenAI's."""

from collections.abc import Callable

import application
import harness as h

TOOL = '''
class Tools:
    def weather(self, city: str) -> str:
        """Tell the weather.

        :param city: The name of a city.
        """
        return "sunny in " + city
'''


def scenarios(app: application.Application, prefix: str, model: str, caller: str) -> None:
    """Run the scenarios with the names of two models. Their results are named with ``prefix``."""
    wrong = f"{prefix}a-wrong-option"

    def chat() -> None:
        with app.chat(model) as page:
            h.check(h.ANSWER in page.ask(h.QUESTION), "the answer")
            page.send("And of Italy?")
            page.expect("Rome")

    def stream() -> None:
        with app.chat(model) as page:
            page.send(h.LONG)
            lengths: set[int] = set()
            while len(lengths) < 4:  # the text grows while it is read
                page.page.wait_for_timeout(200)
                lengths.add(len(page.answer.inner_text()))
            page.stop()

    def tools() -> None:
        with app.chat(caller) as page:
            page.use_tool("Weather")
            text = page.ask("Tell me the weather in Rome.")
            h.check("It is sunny." in text, text)
            page.page.get_by_role("button", name="View Result from weather").click()
            page.expect("sunny in Rome")

    def structured() -> None:
        raise h.NotApplicable("its page has no structured output")

    def errors() -> None:
        form = {"id": wrong, "name": wrong, "base_model_id": model, "meta": {}}
        app.post("/api/v1/models/create", {**form, "params": {"temperature": -1}})
        with app.chat(wrong) as page:
            page.send(h.QUESTION)
            page.expect("temperature")

    def cancel() -> None:
        before = h.aborts()
        with app.chat(model) as page:
            page.send(h.LONG)
            page.expect("1")
            page.stop()
            h.check_aborted(before)

    each: tuple[Callable[[], None], ...] = (chat, stream, tools, structured, errors, cancel)
    for scenario in each:
        scenario.__name__ = prefix + scenario.__name__
    h.run(*each)


with application.running() as app:
    app.post(
        "/api/v1/tools/create",
        {"id": "weather", "name": "Weather", "content": TOOL, "meta": {"description": "tells it"}},
    )
    tagged = f"{h.MODEL}:latest"
    scenarios(app, "", tagged, f"{application.SECOND}.{tagged}")
    scenarios(
        app,
        "openai_",
        f"{application.OPENAI}.{h.MODEL}",
        f"{application.OPENAI_SECOND}.{h.MODEL}",
    )
