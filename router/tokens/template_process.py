"""A process that renders chat templates.

A template is a program of the model's files. It may loop for hours or fill the memory, and what an
honest one costs may grow with the square of the number of messages. `python -m
router.tokens.template_process` reads from standard input and replies on standard output, in frames
(`shared.sandbox.pipe_frames`). A job is one frame with a `TemplateSpec` and one with a `RenderJob`;
an answer is a frame with a `RenderAnswer`. It exits at the end of its input.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NoReturn, cast

import msgspec

from router.errors import InvalidRequest
from router.schemas.conversation import ChatMessage, ContentPart, PromptEnding, Tool
from router.schemas.images import ImageContent
from router.tokens.templates import ChatTemplate
from shared.sandbox.memory_limit import MemoryLimit
from shared.sandbox.pipe_frames import read_frame, write_frames

MEMORY_LIMIT_BYTES = 1 << 30
"""Added to what the process uses before it renders."""
TEXT_FACTOR, MORE_TEXT_BYTES = 8, 1 << 20
"""The text of a prompt has at most so many times the bytes of its request, and so many more."""
_MAX_LOADED = 16
_MAX_MESSAGE_CHARS = 4096


class TemplateSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A chat template, and what it uses of its tokenizer."""

    source: str | dict[str, str]  # one template, or several by name
    special_tokens: dict[str, Any]
    control_tokens: list[str]
    has_thinking: bool
    has_reasoning: bool
    template_args: dict[str, Any]
    image_tokens: list[str]
    call_syntax: str


class _SentPart(ContentPart, frozen=True):
    image: int | None = None


class _SentMessage(ChatMessage, frozen=True):
    content: str | list[_SentPart] | None = None  # type: ignore[assignment]


class _SentFunction(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _SentTool(msgspec.Struct, frozen=True):
    function: _SentFunction


class RenderJob(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation. Its images are numbers."""

    messages: Sequence[Any]
    tools: Sequence[Any]
    template_args: dict[str, Any]
    ending: PromptEnding
    limit_s: float  # of processor time


class _SentJob(RenderJob, frozen=True, kw_only=True):
    messages: list[_SentMessage]
    tools: list[_SentTool]


Excess = Literal["time", "memory", "text"]


class RenderAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a prompt and the numbers of its images; or what the template used too much of;
    or the name of an error's class and its fields."""

    text: str = ""
    images: list[int] = []
    excess: Excess | None = None
    error: str = ""
    message: str = ""
    param: str | None = None
    code: str | None = None
    used_s: float = 0.0  # processor time for this job
    processor_s: float = 0.0  # used by the process until now


class _TooLong(BaseException):
    """The processor time is used up. Not an Exception: those of a template are handled."""


class _TooLarge(BaseException):
    """The memory is used up."""


def main() -> None:
    """Render until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries may print to stdout
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _on_limit)
    import transformers.utils.chat_template_utils  # noqa: F401

    gc.freeze()
    limit = MemoryLimit(MEMORY_LIMIT_BYTES)
    while True:
        spec, job = read_frame(sys.stdin.buffer), read_frame(sys.stdin.buffer)
        began = time.process_time()
        answer = _answer(spec, job, limit)
        now = time.process_time()
        answer = msgspec.structs.replace(answer, used_s=now - began, processor_s=now)
        write_frames(answers, msgspec.msgpack.encode(answer))
        del spec, job, answer


def _on_limit(*_: object) -> NoReturn:
    raise _TooLong


def _answer(spec: bytes, encoded: bytes, limit: MemoryLimit) -> RenderAnswer:
    try:
        job = msgspec.json.decode(encoded, type=_SentJob)
        _bound_processor_time(job.limit_s)
        try:
            with limit.applied():
                answer = _rendered(spec, job)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _TooLong:
        return RenderAnswer(excess="time")
    except (MemoryError, _TooLarge):
        return RenderAnswer(excess="memory")
    except InvalidRequest as error:
        return RenderAnswer(
            error=type(error).__name__,
            message=error.message[:_MAX_MESSAGE_CHARS],
            param=error.param,
            code=error.code,
        )
    except (msgspec.ValidationError, RecursionError) as error:
        return RenderAnswer(error="InvalidRequest", message=f"Invalid messages: {error}")
    if len(answer.text.encode(errors="replace")) > TEXT_FACTOR * len(encoded) + MORE_TEXT_BYTES:
        return RenderAnswer(excess="text")
    return answer


def _bound_processor_time(limit_s: float) -> None:
    """Interrupt the template after ``limit_s``. The second limit ends the process, if the template
    is inside one call into the interpreter that takes for ever, and nothing is left to kill it."""
    most = int(time.process_time() + 2 * limit_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    signal.setitimer(signal.ITIMER_PROF, limit_s)


def _rendered(spec: bytes, job: _SentJob) -> RenderAnswer:
    text, images = _template(spec).rendered(
        [_with_images(message) for message in job.messages],
        cast(Sequence[Tool], job.tools),
        job.template_args,
        ending=job.ending,
    )
    return RenderAnswer(text=text, images=cast(list[int], images))


def _with_images(message: _SentMessage) -> ChatMessage:
    if not isinstance(message.content, list):
        return message
    content = [
        part if part.image is None else ImageContent(part.type, image=cast(Any, part.image))
        for part in message.content
    ]
    return msgspec.structs.replace(message, content=content)


@lru_cache(_MAX_LOADED)
def _template(encoded: bytes) -> ChatTemplate:
    spec = msgspec.msgpack.decode(encoded, type=TemplateSpec)
    return ChatTemplate(
        _TemplateTokenizer(spec),
        spec.template_args,
        has_reasoning=spec.has_reasoning,
        image_tokens=spec.image_tokens,
        call_syntax=spec.call_syntax,
    )


class _ControlToken(str):
    special = True


class _TemplateTokenizer:
    """The parts of a tokenizer that a `ChatTemplate` uses, without the vocabulary."""

    has_chat_template = True

    def __init__(self, spec: TemplateSpec) -> None:
        self.chat_template = spec.source
        self.has_thinking = spec.has_thinking
        self.added_tokens_decoder = dict(enumerate(map(_ControlToken, spec.control_tokens)))
        self._special_tokens = spec.special_tokens

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tokenize: bool, tools: Any, **args: Any
    ) -> str:
        """Render as the method of mlx-lm's and transformers' tokenizers does."""
        from transformers.utils.chat_template_utils import render_jinja_template

        if not messages:
            raise ValueError("Cannot apply chat template to an empty conversation.")
        args.setdefault("enable_thinking", self.has_thinking)
        plain = [{k: v for k, v in each.items() if v is not None} for each in messages]
        try:
            texts, _ = render_jinja_template(
                conversations=[plain],
                tools=tools,
                chat_template=self._source(tools),
                **{**self._special_tokens, **args},
            )
        except MemoryError:
            raise _TooLarge from None
        return cast(str, texts[0])

    def _source(self, tools: Any) -> str:
        if isinstance(self.chat_template, str):
            return self.chat_template
        if tools is not None and "tool_use" in self.chat_template:
            return self.chat_template["tool_use"]
        if "default" not in self.chat_template:
            names = sorted(self.chat_template)
            raise ValueError(f"The model has several chat templates, none is 'default': {names}.")
        return self.chat_template["default"]


if __name__ == "__main__":
    main()
