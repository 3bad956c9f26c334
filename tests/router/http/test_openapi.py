"""The description of the API, and the page that shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from router.schemas.body import refusals
from router.schemas.requests import ChatRequest
from tests.router.conftest import Server, StartServer, ok


@pytest.fixture(scope="module")
def model_dir(fim_model_dir: Path) -> Path:
    return fim_model_dir


@pytest.fixture(scope="module")
def guarded(start_server: StartServer) -> Server:
    return start_server("--api-key=sesame", "--metrics-key=scrape", "--root-path=/llm")


@pytest.fixture
def document(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.client.get("/openapi.json").json()
    return found


def test_the_description_is_valid_openapi(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    OpenAPIV31SpecValidator(document).validate()


def test_every_operation_answers_as_described(served: Server, document: dict[str, Any]) -> None:
    for template, operations in document["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            earlier = served.client.post("/v1/responses", json={"input": "hello"}).json()["id"]
            path = template.replace("{model}", "tiny").replace("{response_id}", earlier)
            path = path.replace("{file}", "main.js")
            body = content["example"] if content else None
            with served.client.stream(method, path, json=body) as answer:
                if path != "/page/feed":  # which has no end
                    answer.read()
                managed = path in ("/api/pull", "/api/delete")
                assert answer.status_code in ((403,) if managed else (200, 400)), path
                check(document, operation, answer)


def described_as(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    jsonschema.validate(value, {**schema, "components": document["components"]})


def check(document: dict[str, Any], operation: dict[str, Any], answer: httpx.Response) -> None:
    described = operation["responses"][str(answer.status_code)]
    media_type = answer.headers["content-type"].partition(";")[0]
    schema = described["content"][media_type]["schema"]
    if media_type == "application/json":
        described_as(document, schema, answer.json())


def post_example(server: Server, operation: Any, path: str, **fields: Any) -> list[str]:
    """Return the lines of the answer to the example of a request."""
    body = operation["requestBody"]["content"]["application/json"]["example"]
    return server.post(path, **{**body, **fields}).text.splitlines()


def test_errors_are_described(document: dict[str, Any], server: Server) -> None:
    statuses = "200 400 401 403 404 408 413 415 429 500 503 504"
    for path in ("/v1/chat/completions", "/v1/messages"):
        operation = document["paths"][path]["post"]
        assert list(operation["responses"]) == statuses.split()
        assert "retry-after" in operation["responses"]["429"]["headers"]
        check(document, operation, server.client.post(path, json={}))


@pytest.mark.parametrize(
    "name", ["chat/completions", "completions", "fim/completions", "messages", "responses"]
)
def test_events_are_as_described(name: str, document: dict[str, Any], served: Server) -> None:
    path = f"/v1/{name}"
    operation = document["paths"][path]["post"]
    content = operation["responses"]["200"]["content"]["text/event-stream"]
    data = content["schema"]["properties"]["data"]
    json_data, ends = (data, []) if "anyOf" not in data else (data["anyOf"][0], data["anyOf"][1:])
    lines = post_example(served, operation, path, stream=True)
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if ends:
        assert events.pop() == ends[0]["const"]
    assert len(events) >= 2  # tokens may come together
    for event in events:
        described_as(document, json_data["contentSchema"], json.loads(event))


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_lines_are_as_described(path: str, document: dict[str, Any], served: Server) -> None:
    operation = document["paths"][path]["post"]
    described = operation["responses"]["200"]["content"]["application/x-ndjson"]["schema"]
    lines = post_example(served, operation, path)
    assert len(lines) >= 2
    for line in lines:
        described_as(document, described, json.loads(line))


def test_unsupported_fields_have_neutral_values(document: dict[str, Any], server: Server) -> None:
    unsupported = refusals(ChatRequest)
    assert unsupported
    properties = document["components"]["schemas"]["ChatRequest"]["properties"]
    for name in unsupported:
        for value in properties[name]["enum"]:
            assert server.chat(**{name: value}).status_code != 400, (name, value)
        wrong: dict[str, Any] = {name: {"x": 1}}
        assert server.chat(**wrong).status_code == 400


def test_keys_are_described_where_they_are_needed(server: Server, guarded: Server) -> None:
    def security(server: Server, path: str, method: str = "get") -> list[dict[str, Any]]:
        found: Any = server.client.get("/openapi.json").json()["paths"]
        return found[path][method]["security"]

    ways: list[dict[str, list[str]]] = [{"bearer": []}, {"x-api-key": []}]
    assert security(guarded, "/v1/models") == security(guarded, "/metrics") == ways
    assert security(server, "/v1/models") == [{}, *ways]
    assert security(guarded, "/livez") == []


def test_the_description_has_the_base_path(server: Server, guarded: Server) -> None:
    for asked, url in ((server, "/"), (guarded, "/llm")):
        assert asked.client.get("/openapi.json").json()["servers"] == [{"url": url}]
    assert guarded.client.get("/llm/openapi.json").status_code == 200


def test_the_docs_page_needs_no_key_and_loads_nothing_else(guarded: Server) -> None:
    for path in ("/docs", "/llm/docs"):
        answer = ok(guarded.client.get(path))
        assert answer.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert not re.findall(r"(?:https?:)?//[\w-]+\.", answer.text)
        assert not re.findall(r"""(?:src|href)=["']/""", answer.text)  # a proxy's path is kept


def test_a_405_names_all_methods_of_the_path(server: Server) -> None:
    answer = server.client.put("/v1/responses/r")
    assert answer.status_code == 405
    assert {"GET", "DELETE"} <= set(answer.headers["allow"].split(", "))
