"""What LocalAI asks for, as flags and requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.localai.errors import InvalidCall
from services.localai.loading import load_request
from services.localai.messages import ModelOptions, PredictOptions
from services.localai.prediction import api_request


def test_a_model_is_its_directory_or_an_id_of_the_hub(tmp_path: Path) -> None:
    assert load_request(ModelOptions(Model="a/b", ModelFile="/none/a/b")).model == "a/b"
    assert load_request(ModelOptions(Model="a/b", ModelFile=str(tmp_path))).model == str(tmp_path)


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({"TrustRemoteCode": True}, {"--trust-remote-code"}),
        ({"MaxModelLen": 512}, {"--max-kv-size=512"}),
        ({"LoraAdapter": "/a", "LoraAdapters": [""]}, {"--adapter-path=/a"}),
        (
            {"DraftModel": "/models/a/small", "ModelPath": "/models"},
            {"--spec-decode=draft", "--draft-model-path=a/small"},
        ),
        ({"Options": ["eos_token:<|end|>", "deterministic:true"]}, {"--eos-token=<|end|>"}),
        ({"Options": ["adapter: a=/a", "adapter: b=/b"]}, {"--adapter=a=/a", "--adapter=b=/b"}),
        (
            {"EngineArgs": '{"kv-bits": 16, "trust_remote_code": false}'},
            {"--kv-bits=16", "--no-trust-remote-code"},
        ),
    ],
)
def test_fields_and_options_are_flags(fields: dict[str, Any], flags: set[str]) -> None:
    assert flags <= set(load_request(ModelOptions(Model="m", **fields)).flags)


def test_options_for_requests_hold_for_all_and_unknown_ones_are_named() -> None:
    options = ["temp:0.5", "top_k:3", "max_cache_entries:4", "use_jinja:true", "no colon"]
    request = load_request(ModelOptions(Model="m", Options=options))
    assert request.flags == ("--model", "m")
    assert request.ignored == ("use_jinja",)
    assert request.defaults == {"temperature": 0.5, "top_k": 3}
    asked = PredictOptions(Prompt="p", Temperature=0.9, TopP=0.8)
    body = api_request(asked, "m", request.defaults).body
    assert (body["temperature"], body["top_k"], body["top_p"]) == (0.5, 3, 0.8)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"Model": ""}, "Model is empty"),
        ({"Embeddings": True}, "Embeddings"),
        ({"LoraAdapters": ["/a", "/b"]}, "one adapter"),
        ({"Options": ["kv_bits:x"]}, "--kv-bits"),
        ({"Options": ["temp:hot"]}, "temp is 'hot'"),
        ({"Options": ["temp:true"]}, "temp is 'true'"),
        ({"EngineArgs": "[1]"}, "EngineArgs"),
        ({"EngineArgs": '{"port": 80}'}, "'port'"),
    ],
)
def test_what_cannot_be_loaded_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidCall, match=words):
        load_request(ModelOptions(**{"Model": "m", **fields}))
