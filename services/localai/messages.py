"""The messages of LocalAI's gRPC service `backend.Backend` that this backend reads and writes.

Names and numbers of fields are those in LocalAI's ``backend/backend.proto``. Unlisted fields are
skipped when a message is read, as Protocol Buffers does with unknown fields.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "backend"
SERVICE = f"{PACKAGE}.Backend"

_Field = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "uint64": _Field.TYPE_UINT64,
    "float": _Field.TYPE_FLOAT,
    "double": _Field.TYPE_DOUBLE,
}
_STATES = {"UNINITIALIZED": 0, "BUSY": 1, "READY": 2, "ERROR": -1}

_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "HealthMessage": {},
    "MetricsRequest": {},
    "MetricsResponse": {
        "slot_id": (1, "int32"),
        "prompt_json_for_slot": (2, "string"),
        "tokens_per_second": (3, "float"),
        "tokens_generated": (4, "int32"),
        "prompt_tokens_processed": (5, "int32"),
    },
    "Message": {
        "role": (1, "string"),
        "content": (2, "string"),
        "name": (3, "string"),
        "tool_call_id": (4, "string"),
        "reasoning_content": (5, "string"),
        "tool_calls": (6, "string"),
    },
    "PredictOptions": {
        "Prompt": (1, "string"),
        "Seed": (2, "int32"),
        "Tokens": (4, "int32"),
        "TopK": (5, "int32"),
        "Repeat": (6, "int32"),
        "Temperature": (9, "float"),
        "Penalty": (10, "float"),
        "StopPrompts": (13, "repeated string"),
        "IgnoreEOS": (14, "bool"),
        "FrequencyPenalty": (17, "float"),
        "PresencePenalty": (18, "float"),
        "LogitBias": (23, "string"),
        "Grammar": (29, "string"),
        "TopP": (32, "float"),
        "EmbeddingTokens": (35, "repeated int32"),
        "Embeddings": (36, "string"),
        "NegativePrompt": (40, "string"),
        "Images": (42, "repeated string"),
        "UseTokenizerTemplate": (43, "bool"),
        "Messages": (44, "repeated Message"),
        "Videos": (45, "repeated string"),
        "Audios": (46, "repeated string"),
        "CorrelationId": (47, "string"),
        "Tools": (48, "string"),
        "ToolChoice": (49, "string"),
        "Logprobs": (50, "int32"),
        "TopLogprobs": (51, "int32"),
        "Metadata": (52, "map string"),
        "MinP": (53, "float"),
        "ModelIdentity": (54, "string"),
    },
    "ToolCallDelta": {
        "index": (1, "int32"),
        "id": (2, "string"),
        "name": (3, "string"),
        "arguments": (4, "string"),
    },
    "ChatDelta": {
        "content": (1, "string"),
        "reasoning_content": (2, "string"),
        "tool_calls": (3, "repeated ToolCallDelta"),
    },
    "Reply": {
        "message": (1, "bytes"),
        "tokens": (2, "int32"),
        "prompt_tokens": (3, "int32"),
        "timing_prompt_processing": (4, "double"),
        "timing_token_generation": (5, "double"),
        "logprobs": (7, "bytes"),
        "chat_deltas": (8, "repeated ChatDelta"),
    },
    "ModelOptions": {
        "Model": (1, "string"),
        "Embeddings": (10, "bool"),
        "ModelFile": (21, "string"),
        "LoraAdapter": (36, "string"),
        "DraftModel": (39, "string"),
        "TrustRemoteCode": (51, "bool"),
        "MaxModelLen": (54, "int32"),
        "TensorParallelSize": (55, "int32"),
        "ModelPath": (59, "string"),
        "LoraAdapters": (60, "repeated string"),
        "Options": (62, "repeated string"),
        "Reranking": (71, "bool"),
        "EngineArgs": (73, "string"),
    },
    "Result": {"message": (1, "string"), "success": (2, "bool")},
    "TokenizationResponse": {"length": (1, "int32"), "tokens": (2, "repeated int32")},
    "EmbeddingResult": {"embeddings": (1, "repeated float")},
    "MemoryUsageData": {"total": (1, "uint64"), "breakdown": (2, "map uint64")},
    "StatusResponse": {"state": (1, "State"), "memory": (2, "MemoryUsageData")},
}
"""By message and field: its number and type. A ``map`` has string keys."""


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="mlx_lm_server/localai.proto", package=PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            _add(message, field, number, kind)
    states = next(each for each in file.message_type if each.name == "StatusResponse")
    enum = states.enum_type.add(name="State")
    for state, value in _STATES.items():
        enum.value.add(name=state, number=value)
    return file


def _add(message: descriptor_pb2.DescriptorProto, name: str, number: int, kind: str) -> None:
    shape, _, kind = kind.rpartition(" ")
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if shape:
        field.label = _Field.LABEL_REPEATED
    if shape == "map":
        entry = message.nested_type.add(name=f"{name[0].upper()}{name[1:]}Entry")
        entry.options.map_entry = True
        _add(entry, "key", 1, "string")
        _add(entry, "value", 2, kind)
        kind = f"{message.name}.{entry.name}"
    if kind in _TYPES:
        field.type = _TYPES[kind]
    elif kind == "State":
        field.type, field.type_name = _Field.TYPE_ENUM, f".{PACKAGE}.{message.name}.State"
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"


# A separate pool: LocalAI's generated classes may be loaded in the same process.
_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_file())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


HealthMessage = _message("HealthMessage")
MetricsRequest = _message("MetricsRequest")
MetricsResponse = _message("MetricsResponse")
Message = _message("Message")
PredictOptions = _message("PredictOptions")
ToolCallDelta = _message("ToolCallDelta")
ChatDelta = _message("ChatDelta")
Reply = _message("Reply")
ModelOptions = _message("ModelOptions")
Result = _message("Result")
TokenizationResponse = _message("TokenizationResponse")
EmbeddingResult = _message("EmbeddingResult")
MemoryUsageData = _message("MemoryUsageData")
StatusResponse = _message("StatusResponse")
