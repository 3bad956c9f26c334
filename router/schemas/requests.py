"""Request bodies of chat and text completions, in OpenAI's format."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from router.errors import InvalidRequest, InvalidValue
from router.schemas.body import TokenId, other_name, refused, unless
from router.schemas.conversation import (
    MAX_TOOLS,
    AllowedTools,
    ChatMessage,
    FunctionName,
    LaterTool,
    PredictedContent,
    PromptEnding,
    Tool,
    ToolChoice,
    ToolMode,
    image_chars,
    prompt_ending,
)
from router.schemas.other_servers import Seed
from router.schemas.sampling import SamplingRequest

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
MAX_PROMPTS = 128

LogprobsCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
NumChoices = Annotated[int, Meta(ge=1, le=16)]
StopString = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
StopStrings = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
MaxTokens = Annotated[int, Meta(ge=-2, le=2**31 - 1)]
NO_LIMIT = -1, -2
"""Values of `MaxTokens` that mean the same as null, as in llama.cpp."""
OwnMaxTokens = Annotated[MaxTokens | None, unless(*NO_LIMIT)]
_OtherMaxTokens = Annotated[MaxTokens | None, other_name("max_tokens", *NO_LIMIT)]


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Thinking(Struct, frozen=True, kw_only=True):
    """Whether the model reasons, as DeepSeek, GLM and Kimi let clients choose it. ``auto`` leaves
    it to the chat template."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


class Reasoning(Struct, frozen=True, kw_only=True):
    """The same, as OpenRouter lets clients choose it."""

    effort: Annotated[str, Meta(max_length=64)] | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class GenerationRequest(SamplingRequest, frozen=True, kw_only=True):
    """Fields of chat and text completions."""

    may_be_empty: ClassVar[bool] = False  # whether an answer may have 0 tokens

    stream_options: StreamOptions | None = None
    return_progress: Annotated[
        bool | None,
        Meta(description="In a stream: report how much of the prompt is computed, until it is."),
    ] = None
    n: NumChoices | None = None
    max_tokens: OwnMaxTokens = None
    stop: StopStrings | None = None
    prompt_logprobs: LogprobsCount | None = None

    # Other servers' and APIs' names of the fields above.
    n_cmpl: Annotated[NumChoices | None, other_name("n")] = None
    n_predict: _OtherMaxTokens = None
    max_new_tokens: _OtherMaxTokens = None
    max_output_tokens: _OtherMaxTokens = None
    stop_sequences: Annotated[StopStrings | None, other_name("stop", [])] = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        given = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        return tuple(filter(None, given))

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives to report for each token. None: no log-probabilities."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether the prompts are returned before their answers."""
        return False

    @property
    def echo_prompts(self) -> list[str | list[int]] | None:
        """The prompts to return before their answers, as text or token ids. Copies them."""
        return None

    @property
    def reports_progress(self) -> bool:
        """Whether the answer reports how much of the prompt is computed."""
        return bool(self.stream and self.return_progress)

    @property
    def may_reason(self) -> bool:
        """Whether reasoning may come before the answer, if the model reasons."""
        return False

    @property
    def max_context(self) -> int | None:
        """Max tokens of a prompt and its answer together. None: the model's context."""
        return None

    def check(self) -> None:
        _ = self.grammar, self.repetition  # raise if one of their fields is invalid
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name, None) == 0 and not self.may_be_empty:
                raise InvalidValue(f"'{name}' must be at least 1.", param=name)
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

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """``enable_thinking`` and ``thinking_budget`` can also be set in ``chat_template_kwargs``, or
    in ``thinking`` or ``reasoning``; a ``reasoning_effort`` of ``none`` makes the first false. With
    ``continue_final_message``, the answer continues the last message, which is the assistant's,
    without repeating it."""

    may_have_images = True

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: OwnMaxTokens = None
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
    thinking: bool | Thinking | None = None
    reasoning_effort: Annotated[str, Meta(max_length=64)] | None = None
    reasoning: Reasoning | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: PredictedContent | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobsCount | None = None

    add_special_tokens: Annotated[Any, refused(False)] = None
    echo: Annotated[Any, refused(False)] = None
    functions: Annotated[Any, refused([], advice="Use 'tools'.")] = None
    function_call: Annotated[Any, refused("none", "auto", advice="Use 'tool_choice'.")] = None
    suffix: Annotated[Any, refused("")] = None
    audio: Annotated[Any, refused()] = None
    modalities: Annotated[Any, refused(["text"])] = None
    web_search_options: Annotated[Any, refused()] = None

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
        tools = list(self.tools or ()) if self.requires_call else self.callable_tools
        return [tool for tool in tools if not isinstance(tool, LaterTool)]

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
        reasoning = self.reasoning or Reasoning()
        effort = reasoning.effort if self.reasoning_effort is None else self.reasoning_effort
        thinking = False if effort == "none" else self._enable_thinking
        if thinking is not None:
            args.setdefault("enable_thinking", thinking)
        budget = self.thinking_budget
        if budget is None and isinstance(self.thinking, Thinking):
            budget = self.thinking.budget_tokens
        if budget is None:
            budget = reasoning.max_tokens
        if budget is not None:
            args.setdefault("thinking_budget", budget)
        if effort not in (None, "none"):
            args.setdefault("reasoning_effort", effort)
        return args

    @property
    def may_reason(self) -> bool:
        return self.template_args.get("enable_thinking") is not False

    @property
    def _enable_thinking(self) -> bool | None:
        if self.enable_thinking is not None:
            return self.enable_thinking
        match self.thinking:
            case Thinking(type="auto"):
                return None
            case Thinking(type=kind):
                return kind != "disabled"
            case None:
                return self.reasoning.enabled if self.reasoning else None
            case given:
                return given

    @property
    def max_thinking_tokens(self) -> int | None:
        """``thinking_budget``, which can also be set in ``chat_template_kwargs``."""
        tokens = self.template_args.get("thinking_budget")
        return min(tokens, 2**31 - 1) if type(tokens) is int and tokens >= 0 else None

    @property
    def hides_reasoning(self) -> bool:
        """Whether the answer has no reasoning, which the model may write all the same."""
        excludes = self.reasoning is not None and self.reasoning.exclude
        return bool(excludes) or self.include_reasoning is False

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
    suffix: Annotated[
        str | None,
        Meta(description="The text after the answer, for models with fill-in-the-middle."),
    ] = None
    logprobs: LogprobsCount | None = None
    echo: bool | None = None

    add_special_tokens: bool | None = None

    top_logprobs: Annotated[Any, refused(0, advice="Use 'logprobs'.")] = None
    max_completion_tokens: _OtherMaxTokens = None

    def check(self) -> None:
        super().check()
        if self.echo and self.suffix:
            raise InvalidRequest("'echo' cannot be combined with 'suffix'.", param="echo")
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
    def echoes(self) -> bool:
        return bool(self.echo)

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


class FimRequest(GenerationRequest, frozen=True, kw_only=True):
    """The text before and after a gap, as Mistral's clients send it."""

    prompt: str
    suffix: str | None = None
    random_seed: Annotated[Seed | None, other_name("seed")] = None
    max_completion_tokens: _OtherMaxTokens = None

    @property
    def continues_prompt(self) -> bool:
        return True
