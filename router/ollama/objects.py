"""Answers of Ollama's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from router.schemas.completions import ChatCompletionTokenLogprob

Nanoseconds = Annotated[int, Meta(ge=0)]
DoneReason = Literal["stop", "length", "load", "unload"]


class OllamaAnswer(Struct, frozen=True, kw_only=True):
    """A complete answer or a part of one. The last part has ``done`` set and includes
    the figures."""

    model: str
    created_at: str
    done: bool
    done_reason: DoneReason | UnsetType = UNSET
    logprobs: list[ChatCompletionTokenLogprob] | UnsetType = UNSET
    total_duration: Nanoseconds | UnsetType = UNSET
    load_duration: Nanoseconds | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: Nanoseconds | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: Nanoseconds | UnsetType = UNSET


class OllamaCalledFunction(Struct, frozen=True):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(Struct, frozen=True):
    id: str
    function: OllamaCalledFunction


class OllamaReply(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaChatAnswer(OllamaAnswer, frozen=True, kw_only=True):
    message: OllamaReply


class OllamaGenerateAnswer(OllamaAnswer, frozen=True, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET
    context: Annotated[
        list[int] | UnsetType, Meta(description="The tokens of the prompt and the answer.")
    ] = UNSET


# -- models --------------------------------------------------------------------


class OllamaModelDetails(Struct, frozen=True, kw_only=True):
    """Texts are empty if unknown. Before the model is loaded for the first time, they are read from
    its files."""

    parent_model: str = ""
    format: Literal["safetensors"] = "safetensors"
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Struct, frozen=True, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: Annotated[int, Meta(description="Size of the weights in bytes; 0: unknown.")]
    digest: str
    details: OllamaModelDetails
    capabilities: list[str]


class OllamaModelList(Struct, frozen=True):
    models: list[OllamaModel]


class OllamaRunningModel(Struct, frozen=True, kw_only=True):
    name: str
    model: str
    size: Annotated[int, Meta(description="Memory used by all its engines, in bytes.")]
    digest: str
    details: OllamaModelDetails
    expires_at: Annotated[
        str,
        Meta(
            description="When the model is unloaded without a request; the year 9999 means never."
        ),
    ]
    size_vram: int
    context_length: int


class OllamaRunningList(Struct, frozen=True):
    models: list[OllamaRunningModel]


class OllamaShown(Struct, frozen=True, kw_only=True):
    modelfile: str
    parameters: str
    template: Annotated[str, Meta(description="The chat template, in Jinja.")]
    details: OllamaModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(Struct, frozen=True):
    version: Annotated[str, Meta(description="The version of Ollama whose API is served.")]
    server_version: str


class OllamaProgress(Struct, frozen=True, kw_only=True):
    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


class OllamaEmbeddings(Struct, frozen=True, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: Nanoseconds
    load_duration: Nanoseconds
    prompt_eval_count: int


class OllamaEmbedding(Struct, frozen=True):
    embedding: list[float]
