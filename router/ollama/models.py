"""Ollama's endpoints with information on models and server: `/api/tags`, `show`, `ps` and
`version`."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from router.api.body import json_response, read_body
from router.api.operations import Operation
from router.errors import BODY_ERRORS, ModelForbidden, ModelNotFound
from router.fleet.engines.engine import ModelReplicas
from router.fleet.router import Router
from router.ollama.errors import OllamaError
from router.ollama.keeping import seconds_left
from router.ollama.names import listed_names, served_name, with_tag
from router.ollama.objects import (
    OllamaModel,
    OllamaModelDetails,
    OllamaModelList,
    OllamaRunningList,
    OllamaRunningModel,
    OllamaShown,
    OllamaVersion,
)
from router.ollama.schemas import OllamaModelRequest
from router.ollama.writer import timestamp
from shared.wire import AdapterRef

_CAPABILITIES = {
    "chat": "decision",
    "tools": "tools",
    "reasoning": "thinking",
    "vision": "vision",
    "insert": "insert",
}
"""Ollama's names of ours."""
_OLLAMA = "0.40.0"
"""The version of Ollama whose API this is: clients refuse servers that are older than they need."""
_NEVER = "9999-12-31T23:59:59Z"
_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def operations(router: Router) -> list[Operation]:
    described = partial(Operation, tag="Ollama", error_type=OllamaError)
    found = [
        described("/api/tags", list_models, "List the models", response_type=OllamaModelList),
        described(
            "/api/show",
            show_model,
            "Show one model",
            method="POST",
            body_type=OllamaModelRequest,
            example={"model": "tiny"},
            response_type=OllamaShown,
            errors=(*BODY_ERRORS, ModelForbidden, ModelNotFound),
        ),
        described("/api/ps", list_running, "List loaded models", response_type=OllamaRunningList),
        described("/api/version", show_version, "The version", response_type=OllamaVersion),
    ]
    if router.settings.no_page:
        found.append(
            Operation(
                "/",
                is_running,
                "Check that the server runs",
                "Ollama",
                access="open",
                media_type="text/plain",
            )
        )
    return found


async def list_models(http: Request) -> Response:
    router: Router = http.app.state.router
    await router.supervised.read_files()
    found = [
        _listed(router, model_id, name)
        for model_id, names in listed_names(router).items()
        if http.state.tenant.may_use(names)
        for name in names
    ]
    found += [
        _listed(router, each.model_id, each.name, each.adapter)
        for each in router.adapters.listed
        if http.state.tenant.may_use(each.names)
    ]
    return json_response(OllamaModelList(found))


async def list_running(http: Request) -> Response:
    router: Router = http.app.state.router
    found = [
        _running(router, model)
        for model in router.registry.models.values()
        if model.ready_engines and http.state.tenant.may_use(model.names)
    ]
    return json_response(OllamaRunningList(found))


async def show_model(http: Request) -> Response:
    router: Router = http.app.state.router
    body, _ = await read_body(http, router, OllamaModelRequest)
    await router.supervised.read_files()
    name = served_name(router, body.wanted)
    for model_id, names in listed_names(router).items():
        if name in names:
            if not http.state.tenant.may_use(names):
                raise ModelForbidden(f"This API key may not use {name}.", param="model")
            return json_response(shown_model(router, model_id))
    if (found := router.adapters.find_listed(name, http.state.tenant.may_use)) is not None:
        if not http.state.tenant.may_use(found.names):
            raise ModelForbidden(f"The API key may not use {name}.", param="model")
        return json_response(shown_model(router, found.model_id, found.adapter))
    raise ModelNotFound(f"The model '{name}' is not served here.", param="model")


async def show_version(http: Request) -> Response:
    router: Router = http.app.state.router
    return json_response(OllamaVersion(version=_OLLAMA, server_version=router.version))


async def is_running(http: Request) -> Response:
    return PlainTextResponse("Ollama is running")


def _listed(
    router: Router, model_id: str, name: str, adapter: AdapterRef | None = None
) -> OllamaModel:
    model = router.registry.models.get(model_id)
    return OllamaModel(
        name=with_tag(name),
        model=with_tag(name),
        modified_at=timestamp(router.started if model is None else model.created),
        size=_weights_bytes(router, model_id),
        digest=_digest(model_id, model, adapter),
        details=_details(router, model_id, adapter),
        capabilities=_capabilities(router, model_id),
    )


def _running(router: Router, model: ModelReplicas) -> OllamaRunningModel:
    left_s = seconds_left(router, model.id)
    size = sum(engine.stats.active_memory_bytes for engine in model.ready_engines)
    return OllamaRunningModel(
        name=with_tag(model.id),
        model=with_tag(model.id),
        size=size,
        digest=_digest(model.id, model),
        details=_details(router, model.id),
        # A client's keep_alive may exceed the maximum year of a date.
        expires_at=_NEVER if left_s > 1e9 else timestamp(time.time() + left_s),
        size_vram=size,
        context_length=model.hello.context_length,
    )


def shown_model(router: Router, model_id: str, adapter: AdapterRef | None = None) -> OllamaShown:
    """Return what is known about a model, or about one of its adapters."""
    model = router.registry.models.get(model_id)
    renderer = None if model is None else model.renderer
    files = router.supervised.files(model_id)
    parameters = ""
    if renderer is not None:
        defaults = vars(renderer.sampling_defaults)
        parameters = "\n".join(f"{name} {value:g}" for name, value in defaults.items())
    return OllamaShown(
        modelfile=f"FROM {model_id}\n" + (f"ADAPTER {adapter.name}\n" if adapter else ""),
        parameters=parameters,
        template=(renderer or files).chat_template + _fim_template(router, model_id),
        details=_details(router, model_id, adapter),
        model_info=dict(_model_info(router, model_id)),
        capabilities=_capabilities(router, model_id),
        modified_at=timestamp(router.started if model is None else model.created),
    )


def _capabilities(router: Router, model_id: str) -> list[str]:
    model = router.registry.models.get(model_id)
    if model is not None and model.hello.task != "generate":
        return ["embedding"] if model.hello.task == "embed" else []
    if model and model.renderer:
        own = model.renderer.capabilities
    else:
        files = router.supervised.files(model_id)
        own = files.capabilities
        if configured := router.supervised.models.get(model_id):
            own += ["vision"] * configured.takes_images
            own += ["insert"] * (files.fim_layout(configured.fim_layout) is not None)
    return ["completion", *(_CAPABILITIES[name] for name in own if name in _CAPABILITIES)]


def _fim_template(router: Router, model_id: str) -> str:
    """Return the layout of prompts for fill-in-the-middle as a comment in Jinja, if there is one:
    Continue takes a template that mentions ``.Suffix`` for a sign of it."""
    model = router.registry.models.get(model_id)
    configured = router.supervised.models.get(model_id)
    layout = None
    if model is not None and model.renderer is not None:
        fim = model.renderer.fim
        layout = None if fim is None else fim.layout
    elif configured is not None:
        layout = router.supervised.files(model_id).fim_layout(configured.fim_layout)
    if layout is None:
        return ""
    text = layout.text.replace("{prefix}", "{{ .Prompt }}").replace("{suffix}", "{{ .Suffix }}")
    return f"{{# fill-in-the-middle: {text} #}}"


def _digest(model_id: str, model: ModelReplicas | None, adapter: AdapterRef | None = None) -> str:
    """Return 64 hex digits, as long as Ollama's, that change with the weights."""
    name = model_id if model is None else model.hello.fingerprint
    name += "" if adapter is None else adapter.digest
    return hashlib.sha256(name.encode()).hexdigest()


def _weights_bytes(router: Router, model_id: str) -> int:
    model = router.registry.models.get(model_id)
    if model is not None and model.hello.weights_bytes:
        return model.hello.weights_bytes
    configured = router.supervised.models.get(model_id)
    return (configured and configured.weights_bytes) or 0


def _config(router: Router, model_id: str) -> Mapping[str, Any]:
    """Return the model's ``config.json``, or the text model's part if it has several."""
    model = router.registry.models.get(model_id)
    files = router.supervised.files(model_id)
    config = model.renderer.config if model and model.renderer else files.config
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def _details(
    router: Router, model_id: str, adapter: AdapterRef | None = None
) -> OllamaModelDetails:
    config = _config(router, model_id)
    family = str(config.get("model_type", ""))
    parameters = _parameters(router, model_id)
    size = f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"
    return OllamaModelDetails(
        parent_model="" if adapter is None else model_id,
        family=family,
        families=[family] if family else [],
        parameter_size=size if parameters else "",
        quantization_level=_precision(config),
    )


def _parameters(router: Router, model_id: str) -> int:
    model = router.registry.models.get(model_id)
    return 0 if model is None else model.hello.parameters


def _precision(config: Mapping[str, Any]) -> str:
    """Return the name of the weights' data type; empty if unknown."""
    quantization = config.get("quantization")
    if isinstance(quantization, dict) and type(bits := quantization.get("bits")) is int:
        return f"{bits}-bit"
    return _TYPES.get(str(config.get("dtype", config.get("torch_dtype"))), "")


def _model_info(router: Router, model_id: str) -> Iterator[tuple[str, Any]]:
    """Yield what is known about the model, under GGUF's names."""
    config = _config(router, model_id)
    model = router.registry.models.get(model_id)
    kind = str(config.get("model_type", ""))
    if kind:
        yield "general.architecture", kind
    yield "general.basename", model_id.rpartition("/")[2]
    if parameters := _parameters(router, model_id):
        yield "general.parameter_count", parameters
    prefix = kind or "general"
    known = {
        "context_length": router.supervised.files(model_id).context_length,
        "vocab_size": config.get("vocab_size"),
    }
    if model is not None:
        hello = model.hello
        known = {"context_length": hello.context_length, "vocab_size": hello.vocab_size}
    yield from ((f"{prefix}.{name}", value) for name, value in known.items() if value)
    for name, key in _GGUF_NAMES.items():
        value = config.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            yield f"{prefix}.{name}", value


_GGUF_NAMES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
