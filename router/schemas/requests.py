"""Request bodies in OpenAI's format.

Every field that is read has a type and a range, so that a decoded body is valid in itself. Checks
that depend on the model are in `router.generation.sampling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta, Struct

from router.errors import InvalidRequest, InvalidValue, NotSupported
from router.schemas.conversation import (
    MAX_TOOLS,
    AllowedTools,
    ChatMessage,
    FunctionName,
    PredictedContent,
    PromptEnding,
    Tool,
    ToolChoice,
    ToolMode,
    image_chars,
    prompt_ending,
)
from router.schemas.structured import StructuredOutputFields
from router.schemas.validation import validation_error

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_PROMPTS = 128

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
LogprobsCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class RequestBody(Struct, frozen=True, kw_only=True):
    """A body of any API. Fields of type ``Any`` are rejected by name unless their value
    is neutral."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """By field, the values besides null that have no effect. True and 1 are different."""
    any_media_type: ClassVar[bool] = False  # whether JSON may be sent with another media type
    may_have_images: ClassVar[bool] = False

    @property
    def image_chars(self) -> int:
        """The number of characters of the images in the body."""
        return 0

    def check(self) -> None:
        """Raise `InvalidRequest` for fields that contradict each other."""

    @property
    def left_out_tools(self) -> list[str]:
        """The types of tools that this server cannot run and does not offer to the model."""
        return []


class SamplingRequest(StructuredOutputFields, RequestBody, frozen=True, kw_only=True):
    """Fields of all APIs that control how an answer is generated. None: not set."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    xtc_probability: Annotated[float, Meta(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Meta(ge=0, le=0.5)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0, le=100)] | None = None
    repetition_context_size: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_BIASES)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None


class GenerationRequest(SamplingRequest, frozen=True, kw_only=True):
    """Fields of chat and text completions."""

    neutral = {
        "top_logprobs": (0,),
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
        "include_stop_str_in_output": (False,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
    }

    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    max_tokens: Count | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    prompt_logprobs: LogprobsCount | None = None

    # Not supported yet.
    best_of: Any = None
    suffix: Any = None
    include_stop_str_in_output: Any = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives to report for each token. None: no log-probabilities."""
        return None

    @property
    def echo_prompts(self) -> list[str | list[int]] | None:
        """The prompts to return before their answers, as text or token ids."""
        return None

    @property
    def max_context(self) -> int | None:
        """Max tokens of a prompt and its answer together. None: the model's context."""
        return None

    def check(self) -> None:
        _ = self.grammar  # raises if one of its fields is invalid
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "'prompt_logprobs' cannot be combined with 'stream'.", param="prompt_logprobs"
            )

    @property
    def continues_prompt(self) -> bool:
        """Whether the prompt ends inside a text that the answer continues."""
        return False

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """``enable_thinking`` and ``thinking_budget`` can also be set in ``chat_template_kwargs``; a
    ``reasoning_effort`` of ``none`` makes the first false. With ``continue_final_message``, the
    answer continues the last message, which is the assistant's, without repeating it."""

    may_have_images = True

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolMode | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking_budget: (
        Annotated[
            int,
            Meta(
                ge=0, le=2**31 - 1, description="Max tokens of reasoning, after which it is ended."
            ),
        ]
        | None
    ) = None
    reasoning_effort: Annotated[str, Meta(max_length=64)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: PredictedContent | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobsCount | None = None

    echo: Any = None
    functions: Any = None  # the predecessor of `tools`
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None

    @property
    def image_chars(self) -> int:
        return image_chars(self.messages)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompt_ending(self) -> PromptEnding:
        return prompt_ending(self.messages, self.add_generation_prompt, self.continue_final_message)

    @property
    def continues_prompt(self) -> bool:
        return self.prompt_ending == "open_message"

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that may be called."""
        if self.tool_choice == "none":
            return []
        names = self._allowed_names
        return [tool for tool in self.tools or () if names is None or tool.function.name in names]

    @property
    def prompt_tools(self) -> list[Tool]:
        """The tools in the prompt: all of them if a grammar restricts calls to the chosen ones, so
        that the prompt does not depend on the choice."""
        return list(self.tools or ()) if self.requires_call else self.callable_tools

    @property
    def requires_call(self) -> bool:
        """Whether the answer must be a call of one of ``callable_tools``."""
        match self.tool_choice:
            case ToolChoice(allowed_tools=AllowedTools(mode=mode)):
                return mode == "required"
            case ToolChoice():
                return True
            case mode:
                return mode == "required"

    @property
    def names_tool(self) -> bool:
        """Whether the request names the one tool that must be called."""
        return isinstance(self.tool_choice, ToolChoice) and self.tool_choice.type == "function"

    @property
    def template_args(self) -> dict[str, Any]:
        """The arguments of the chat template besides messages and tools."""
        args = dict(self.chat_template_kwargs or {})
        thinking = False if self.reasoning_effort == "none" else self.enable_thinking
        if thinking is not None:
            args.setdefault("enable_thinking", thinking)
        if self.thinking_budget is not None:
            args.setdefault("thinking_budget", self.thinking_budget)
        if self.reasoning_effort not in (None, "none"):
            args.setdefault("reasoning_effort", self.reasoning_effort)
        return args

    @property
    def max_thinking_tokens(self) -> int | None:
        """``thinking_budget``, which can also be set in ``chat_template_kwargs``."""
        tokens = self.template_args.get("thinking_budget")
        return min(tokens, 2**31 - 1) if type(tokens) is int and tokens >= 0 else None

    @property
    def _allowed_names(self) -> frozenset[str] | None:
        match self.tool_choice:
            case ToolChoice(function=FunctionName(name=name)):
                return frozenset((name,))
            case ToolChoice(allowed_tools=AllowedTools(tools=tools)):
                return frozenset(tool.function.name for tool in tools)
            case _:
                return None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(
                "'top_logprobs' requires 'logprobs' to be true.", param="top_logprobs"
            )
        if self.continues_prompt and self.grammar is not None:
            raise InvalidRequest(
                "Structured output cannot be combined with an answer that continues a message.",
                param="continue_final_message",
            )
        self._check_messages()
        self._check_tools()

    def _check_messages(self) -> None:
        for index, message in enumerate(self.messages):
            if message.content is None and message.role in ("user", "system", "developer"):
                path = f"messages[{index}].content"
                raise InvalidRequest(f"'{path}' is required.", param=path)

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise InvalidValue(
                    f"There are two tools named '{name}'.",
                    param=f"tools[{index}].function.name",
                )
        choice = self.tool_choice
        if isinstance(choice, ToolChoice) and getattr(choice, choice.type) is None:
            raise InvalidRequest(
                f"A 'tool_choice' of type '{choice.type}' requires '{choice.type}'.",
                param=f"tool_choice.{choice.type}",
            )
        unknown = (self._allowed_names or frozenset()) - set(names)
        if unknown or (self.requires_call and not names):
            missing = f"the tool '{min(unknown)}'" if unknown else "tools"
            raise InvalidValue(
                f"'tool_choice' names {missing}, which is not in 'tools'.", param="tool_choice"
            )


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    logprobs: LogprobsCount | None = None
    echo: bool | None = None

    top_logprobs: Any = None

    def check(self) -> None:
        super().check()
        if not isinstance(self.prompt, list) or isinstance(self.prompt[0], int):
            return
        if len(self.prompt) > MAX_PROMPTS:
            raise InvalidRequest(
                f"{len(self.prompt)} prompts, the limit is {MAX_PROMPTS}.", param="prompt"
            )

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echo_prompts(self) -> list[str | list[int]] | None:
        return self.prompts if self.echo else None

    @property
    def continues_prompt(self) -> bool:
        return not self.echo  # an echo is part of the same text

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return each prompt as text or token ids. Raises `InvalidRequest` if they are mixed."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(item) for item in self.prompt}
        if len(kinds) > 1:
            raise InvalidValue(
                "'prompt' must be a string, a list of strings, token ids, or a list of lists of"
                " token ids.",
                param="prompt",
            )
        if kinds == {int}:
            return [[item for item in self.prompt if isinstance(item, int)]]
        return [item for item in self.prompt if not isinstance(item, int)]


_Body = TypeVar("_Body", bound=RequestBody)


def parse_body(body: bytes, body_type: type[_Body]) -> _Body:
    """Return the request in ``body``. Raises `InvalidRequest` with the name of the field."""
    try:
        request = msgspec.json.decode(body, type=body_type)
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.", code="invalid_json") from None
    return validated(request)


def sampling_fields(request: SamplingRequest) -> dict[str, Any]:
    """Return the fields shared by requests of all APIs, by name."""
    return {name: getattr(request, name) for name in SamplingRequest.__struct_fields__}


def validated(request: _Body) -> _Body:
    """Return ``request``. Raises `NotSupported` for fields that would change the meaning of the
    answer, and `InvalidRequest` for fields that contradict each other."""
    for name in unsupported_fields(type(request)):
        value = getattr(request, name)
        if value is None or any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in request.neutral.get(name, ())
        ):
            continue
        raise NotSupported(f"'{name}' is not supported yet.", param=name)
    request.check()
    return request


@cache
def unsupported_fields(body_type: type[RequestBody]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(body_type) if field.type is Any)
