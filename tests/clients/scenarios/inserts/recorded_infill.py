"""The requests of llama.vscode and llama.vim, as their sources of November 2026 make them."""

import json
import socket
import urllib.error
import urllib.request
from typing import Any

import harness as h
from gaps import FEW, MANY, PREFIX, SUFFIX

EXTRA = [{"text": "import os\n" * 20, "time": 1764400000000, "filename": "main.py"}]
SAMPLERS = {"top_k": 40, "top_p": 0.99, "samplers": ["top_k", "top_p", "infill"]}
OF_VSCODE = {
    "input_prefix": PREFIX,
    "input_suffix": SUFFIX,
    "input_extra": EXTRA,
    "prompt": "a",
    "n_predict": FEW,
    **SAMPLERS,
    "stream": False,
    "cache_prompt": True,
    "n_indent": 4,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
}
WARMING = {
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": EXTRA,
    "prompt": "",
    "n_predict": 0,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1,
}
FIELDS = [
    *("content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms"),
    *("timings/prompt_per_second", "timings/predicted_n", "timings/predicted_ms"),
    *("timings/predicted_per_token_ms", "timings/predicted_per_second", "truncated"),
    "tokens_cached",
]


def asked(body: dict[str, Any], key: str = h.KEY) -> Any:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{h.URL}/infill", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def insert() -> None:
    warm = asked(WARMING)
    h.check(warm["content"] == "" and warm["tokens_predicted"] == 0, warm)
    answer = asked(OF_VSCODE)
    h.check(answer["stop"] and answer["timings"]["predicted_n"] <= FEW, answer)
    h.check(answer["tokens_cached"] > 0, "the other files are not cached")
    of_vim = asked({**OF_VSCODE, "response_fields": FIELDS})
    h.check(list(of_vim) == FIELDS and of_vim["content"] == answer["content"], of_vim)
    h.check(asked({**WARMING, "temperature": 0.0, "response_fields": [""]}) == {}, "no fields")


def errors() -> None:
    wrong = h.failure(urllib.error.HTTPError, asked, {**OF_VSCODE, "input_prefix": None})
    h.check(wrong.code == 400 and b"input_prefix" in wrong.read(), wrong)
    h.check(h.failure(urllib.error.HTTPError, asked, OF_VSCODE, "wrong").code == 401, "a key")


def cancel() -> None:
    before = h.aborts()
    host, _, port = h.URL.rpartition("/")[2].partition(":")
    fields = {"n_predict": MANY, "ignore_eos": True, "n_indent": 0, "t_max_predict_ms": 0}
    body = json.dumps({**OF_VSCODE, **fields}).encode()
    lines = ["POST /infill HTTP/1.1", f"host: {host}", f"authorization: Bearer {h.KEY}"]
    lines += ["content-type: application/json", f"content-length: {len(body)}", "", ""]
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall("\r\n".join(lines).encode() + body)
        connection.settimeout(0.3)
        try:
            connection.recv(1)
        except TimeoutError:
            pass
    h.check_aborted(before)


h.run(insert, errors, cancel, stream="they ask for whole answers")
