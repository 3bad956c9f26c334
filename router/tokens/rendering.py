"""Prompts to token ids and back: a model's chat template, tokenizer and detokenizer.

All of it comes from files sent by an engine. No code from a model runs here: templates run in
processes of their own, and remote code is never trusted."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import msgspec

from router.errors import ApiError, InvalidRequest
from router.schemas.conversation import ChatMessage, FunctionCall, PromptEnding, Tool, ToolCall
from router.schemas.images import ModelImage
from router.tokens.fim import AUTO, FimPrompts, find_layout
from router.tokens.image_prompts import Prompt, expanded
from router.tokens.labels import Labels, find_labels
from router.tokens.model_replies import ModelReplies
from router.tokens.parsing.calls import JSON
from router.tokens.parsing.formats import ReplyFormat, detect_format
from router.tokens.template_process import TemplateSpec
from router.tokens.template_processes import TemplateProcesses
from router.tokens.templates import TOKEN_BREAK, ChatTemplate, Rendered, check_args
from router.tokens.tokenization_cache import LengthCheck, PrefixComparison, TokenizationCache
from router.tokens.vocabulary import Vocabulary
from shared.wire import Vision

_MAX_ENDINGS = 16
"""A template has few endings; one with the time of day in it would have very many."""


class SamplingDefaults:
    """A model's ``generation_config.json``: defaults for values that a request does not set.

    Without this file the temperature is 0, as in mlx-lm's own server."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        greedy = config.get("do_sample") is False
        sampled = config.get("do_sample") is True
        self.temperature = 0.0 if greedy else _number(config, "temperature", 1.0 if sampled else 0)
        self.top_p = _number(config, "top_p", 1.0)
        self.top_k = int(_number(config, "top_k", 0))
        self.min_p = _number(config, "min_p", 0.0)


def _number(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e6
    return float(cast(float, value)) if usable else float(default)


class Renderer:
    """One model's tokenizer. Slow work runs on the threads of a `WorkPool`, several jobs at
    once; `detokenizer` is for the event loop."""

    def __init__(
        self,
        tokenizer: Any,
        detokenizer_source: Any,
        defaults: SamplingDefaults,
        template_args: Mapping[str, Any],
        format: ReplyFormat,
        config: Mapping[str, Any] = MappingProxyType({}),
        vision: Vision | None = None,
        directory: Path = Path(),
        processes: TemplateProcesses | None = None,
        fim_layout: str = AUTO,
    ) -> None:
        self._tokenizer = tokenizer
        self.vision = vision
        """How the model accepts images; None: it accepts none."""
        self.directory = directory
        """The directory of the model's files."""
        self.config = config
        """The model's ``config.json``."""
        image_tokens = _image_tokens(tokenizer, vision)
        call_syntax = JSON.name if format.tools is None else format.tools.name
        self._template = ChatTemplate(
            tokenizer,
            template_args,
            has_reasoning=not format.is_plain,
            image_tokens=image_tokens,
            call_syntax=call_syntax,
        )
        self._processes = processes
        self._template_spec = b""
        """Empty: the template is a function of a library, which this process calls."""
        if processes is not None and _is_jinja(tokenizer):
            self._template_spec = msgspec.msgpack.encode(
                TemplateSpec(
                    source=tokenizer.chat_template,
                    special_tokens=_plain(tokenizer.special_tokens_map),
                    control_tokens=[
                        str(each)
                        for each in tokenizer.added_tokens_decoder.values()
                        if each.special
                    ],
                    has_thinking=tokenizer.has_thinking,
                    has_reasoning=not format.is_plain,
                    template_args=dict(template_args),
                    image_tokens=image_tokens,
                    call_syntax=call_syntax,
                )
            )
        self.sampling_defaults = defaults
        self.vocabulary = Vocabulary(detokenizer_source)
        self._encoder = _Encoder(tokenizer)
        self.replies = ModelReplies(
            format, tokenizer, self.vocabulary, short_ids=self._template.short_ids
        )
        self._tokenization_cache = TokenizationCache(
            self.replies.added_tokens, self.vocabulary.token_bytes, self._encode_rendered
        )
        self.eos_token_ids = frozenset(int(token) for token in tokenizer.eos_token_ids)
        newline = tokenizer.encode("\n", add_special_tokens=False)
        self.xtc_special_ids = sorted({*self.eos_token_ids, *newline})
        """Tokens exempt from XTC: only the model should choose where an answer or a line ends."""
        self._labels: dict[str, Labels] = {}
        """By the ending of prompts."""
        self._least_tokens = self._measured_least_tokens()
        self.fim = self._fim_prompts(fim_layout)
        """Makes prompts for fill-in-the-middle; None: the model has none."""

    @classmethod
    async def load(
        cls,
        directory: Path,
        *,
        tokenizer_options: Mapping[str, Any],
        chat_template: str | None,
        template_args: Mapping[str, Any],
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        fim_layout: str = AUTO,
        vision: Vision | None = None,
        processes: TemplateProcesses | None = None,
    ) -> Renderer:
        """Load the tokenizer files in ``directory``. Its template runs in ``processes``. Raises any
        exception of the loader."""

        def load() -> Renderer:
            tokenizer, detokenizer_source = _load(directory, tokenizer_options)
            template = chat_template
            if template is None and not tokenizer.has_chat_template:
                template = _processor_template(directory)
            if template is not None:
                tokenizer._chat_template = None
                tokenizer.chat_template = template
                tokenizer.has_chat_template = True
            defaults = SamplingDefaults(_read_json(directory / "generation_config.json"))
            format = detect_format(tokenizer, reasoning=reasoning_parser, tools=tool_parser)
            config = _read_json(directory / "config.json")
            return cls(
                tokenizer,
                detokenizer_source,
                defaults,
                template_args,
                format,
                config,
                vision,
                directory,
                processes,
                fim_layout,
            )

        return await asyncio.to_thread(load)

    @property
    def chat_template(self) -> str:
        """The text of the chat template; empty if there is none, or several."""
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else ""

    @property
    def capabilities(self) -> list[str]:
        """The features that this tokenizer and its template make possible."""
        features = {
            "chat": self._tokenizer.has_chat_template,
            "tools": self._tokenizer.has_chat_template and self.replies.format.tools is not None,
            "reasoning": self.replies.format.has_reasoning,
            "vision": self.vision is not None,
            "insert": self.fim is not None,
        }
        return [name for name, available in features.items() if available]

    def _fim_prompts(self, setting: str) -> FimPrompts | None:
        tokenizer, encode = self._tokenizer, self._encoder.encode
        added = tokenizer.added_tokens_decoder
        ids = {str(token): number for number, token in added.items()}
        layout = find_layout(setting, str(self.config.get("model_type", "")), ids)
        if layout is None:
            return None
        first = encode(["a"], True, None)[:1]
        return FimPrompts(
            layout,
            bos_id=first[0] if first != encode(["a"], False, None)[:1] else None,
            control_tokens=[str(token) for token in added.values() if token.special],
            encode=lambda text: encode([text], False, None),
        )

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        check_length: LengthCheck | None = None,
    ) -> list[int]:
        """Return the token ids of a plain prompt, starting with the model's special tokens.
        Raises what ``check_length`` raises."""
        bos = self._tokenizer.bos_token
        add_special_tokens &= bos is None or not text.startswith(bos)
        return self._encoder.encode([text], add_special_tokens, check_length)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]] | None:
        """Return the token ids of two texts in the format of models that compare texts, and the
        type of each token: 1 for the second text. None if the tokenizer does not support pairs."""
        return self._encoder.encode_pair(first, second)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of ``tokens``, including special ones."""
        return self._encoder.decode(tokens)

    def token_strings(self, tokens: list[int]) -> list[str]:
        """Return the tokens as written in the vocabulary."""
        return list(self._tokenizer.convert_ids_to_tokens(tokens))

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        template_args: Mapping[str, Any],
        cache_scope: str | None = None,
        *,
        ending: PromptEnding = "generation_prompt",
        add_special_tokens: bool = False,
        check_length: LengthCheck | None = None,
    ) -> Prompt:
        """Return the token ids of a conversation. Earlier replies in ``cache_scope`` keep their
        generated tokens (`router.tokens.tokenization_cache`). Raises `InvalidRequest`, and what
        ``check_length`` raises."""
        if check_length is not None:
            check_length(self._least_length(messages))
        text, images = self._rendered(messages, tools, template_args, ending)
        if add_special_tokens:
            tokens = self.encode(text.replace(TOKEN_BREAK, ""), check_length=check_length)
        elif cache_scope is None:
            tokens = self._encode_rendered(text, check_length)
        else:
            tokens = self._tokenization_cache.tokenize(cache_scope, text, check_length)
        return self._expanded(tokens, images, check_length)

    def render_around(
        self,
        mark: str,
        messages: Sequence[ChatMessage],
        template_args: Mapping[str, Any],
        *,
        check_length: LengthCheck | None = None,
    ) -> tuple[Prompt, str]:
        """Return the tokens of a conversation up to ``mark``, a text in its last message, and the
        text that follows up to where an answer without reasoning begins. `encode_ending` makes
        tokens of the latter, with another text before it. Raises what `render_chat` raises."""
        if check_length is not None:
            check_length(self._least_length(messages))
        text, images = self._rendered(messages, (), template_args, "generation_prompt")
        before, found, ending = text.partition(mark)
        if not found or mark in ending:
            raise InvalidRequest(
                "The model's chat template does not show the last message once.",
                param="messages",
                code="template_limit",
            )
        tokens = self._encode_rendered(before, check_length)
        prompt = self._expanded(tokens, images, check_length)
        return prompt, ending + self.replies.opening(ending)

    def encode_ending(self, text: str, ending: str) -> list[int]:
        """Return the tokens of a client's ``text`` and of the ``ending`` of a rendered prompt."""
        return self._encode_rendered(self._template.literal(text) + ending, None)

    def labels(self, ending: str) -> Labels:
        """Return the labels of options after prompts with this ``ending`` of the template."""
        found = self._labels.get(ending)
        if found is None:
            last = self._encode_rendered(ending, None)[-1:]
            is_control = bool(last) and last[0] in self.replies.added_tokens
            after_space = bool(ending) and not (ending[-1].isspace() or is_control)
            found = find_labels(lambda text: self._encode_rendered(text, None), ending, after_space)
            if len(self._labels) >= _MAX_ENDINGS:
                self._labels.clear()
            self._labels[ending] = found
        return found

    def _rendered(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        template_args: Mapping[str, Any],
        ending: PromptEnding,
    ) -> Rendered:
        """Return the text of a conversation, with what stands around the images."""
        spec, processes = self._template_spec, self._processes
        if not spec or processes is None:
            found = self._template.rendered(messages, tools, template_args, ending=ending)
        else:
            check_args(template_args)
            found = processes.rendered(spec, messages, tools, template_args, ending)
        if not found.images or self.vision is None:
            return found
        shown = self.vision.before + self.vision.placeholder + self.vision.after
        return found._replace(text=found.text.replace(self.vision.placeholder, shown))

    def _expanded(
        self, tokens: list[int], images: Sequence[ModelImage], check_length: LengthCheck | None
    ) -> Prompt:
        placeholder_id = -1 if self.vision is None else self.vision.placeholder_id
        return expanded(tokens, placeholder_id, images, check_length)

    def _least_length(self, messages: Sequence[ChatMessage]) -> int:
        """Return how many tokens ``messages`` have at least: rendering those that cannot fit may
        take long."""
        kinds = Counter((each.role, bool(each.tool_calls)) for each in messages)
        return sum(count * self._least_tokens.get(kind, 1) for kind, count in kinds.items())

    def _measured_least_tokens(self) -> dict[tuple[str, bool], int]:
        """Return how many tokens the template writes at least for an empty message, by role and
        whether it has calls. It may write none, but no real conversation has more messages than
        a context has tokens."""
        if not self._tokenizer.has_chat_template:
            return {}
        call = ToolCall(FunctionCall("f", "{}"), id="call00000")
        first, found = ChatMessage("user", "x"), dict[tuple[str, bool], int]()
        for message in (
            ChatMessage("user", ""),
            ChatMessage("assistant", ""),
            ChatMessage("assistant", "", tool_calls=[call]),
            ChatMessage("tool", "", tool_call_id="call00000"),
        ):
            few, many = ([first, *[message] * count] for count in (4, 20))
            try:
                texts = [self._rendered(each, (), {}, "last_message").text for each in (few, many)]
            except ApiError:
                continue
            lengths = [len(self._encode_rendered(text, None)) for text in texts]
            found[message.role, bool(message.tool_calls)] = max(1, (lengths[1] - lengths[0]) // 16)
        return found

    def remember_reply(
        self, cache_scope: str, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        """Remember the tokens generated after ``prompt``, for a conversation that continues
        them."""
        self._tokenization_cache.extend(cache_scope, prompt, output)

    def compare(self, cache_scope: str, prompt: Sequence[int]) -> PrefixComparison:
        """Compare ``prompt``, a result of `render_chat`, to the closest earlier text."""
        return self._tokenization_cache.comparison(cache_scope, prompt)

    def without_bos(self, text: str, tokens: Sequence[int]) -> Sequence[int]:
        """Return the ``tokens`` of ``text`` without the BOS token that `encode` adds."""
        bos = self._tokenizer.bos_token
        added = bos is not None and not text.startswith(bos)
        return tokens[1:] if added and tokens[:1] == [self._tokenizer.bos_token_id] else tokens

    def _encode_rendered(self, text: str, check_length: LengthCheck | None) -> list[int]:
        """Return the token ids of a rendered prompt, which already contains its special tokens."""
        pieces = [piece for piece in text.split(TOKEN_BREAK) if piece]
        return self._encoder.encode(pieces, False, check_length)


class _Encoder:
    """Tokenizes on several threads at once.

    A fast tokenizer is called directly, which releases the interpreter; the conversions of
    transformers would take some hundredths of a second without releasing it. Other tokenizers
    are used by one thread at a time."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers import PreTrainedTokenizerBase
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        inner = getattr(tokenizer, "_tokenizer", tokenizer)
        kind = type(inner)
        plain = (
            isinstance(inner, TokenizersBackend)
            and kind._encode_plus is TokenizersBackend._encode_plus
            and kind.encode is PreTrainedTokenizerBase.encode
        )
        tokenizer.encode("a")  # sets the options of a fast tokenizer; later calls change nothing
        self._fast: Any = inner.backend_tokenizer if plain else None
        self._decodes_fast = plain and kind._decode is TokenizersBackend._decode

    def encode(
        self, texts: Sequence[str], add_special_tokens: bool, check_length: LengthCheck | None
    ) -> list[int]:
        """Return the concatenated tokens of ``texts``, each tokenized separately."""
        encode = self._encode_slowly if self._fast is None else self._encode_fast
        tokens: list[int] = []
        for text in texts:
            found = encode(text, add_special_tokens)
            if check_length is not None:
                check_length(len(tokens) + len(found))
            tokens += found if isinstance(found, list) else found.ids
        return tokens

    def _encode_fast(self, text: str, add_special_tokens: bool) -> Any:
        # Not `encode`: that holds the interpreter, for seconds if the text is a megabyte.
        (found,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return found

    def _encode_slowly(self, text: str, add_special_tokens: bool) -> list[int]:
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]] | None:
        if self._fast is None:
            return None
        (found,) = self._fast.encode_batch_fast([(first, second)], add_special_tokens=True)
        return found.ids, found.type_ids

    def decode(self, tokens: list[int]) -> str:
        if self._decodes_fast:
            # Not `decode`: likewise, half a second for 300,000 tokens.
            (text,) = self._fast.decode_batch([tokens], skip_special_tokens=False)
            return str(text)
        with self._lock:
            return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


def warm_up() -> None:
    """Do the slow import before the first model needs it. It takes seconds: call it on a thread."""
    # All files are local: nothing is looked up on the hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import mlx_lm.tokenizer_utils  # noqa: F401


def _load(directory: Path, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the tokenizer, and the one for detokenizing: a second one if detokenizing calls
    into the tokenizer, because two threads would otherwise use it at once."""
    warm_up()
    from mlx_lm import tokenizer_utils

    extra = {**options, "trust_remote_code": False}
    config = _read_json(directory / "config.json")
    eos = config.get("eos_token_id")
    tokenizer = tokenizer_utils.load(directory, extra, eos_token_ids=eos)
    if not isinstance(tokenizer.detokenizer, tokenizer_utils.NaiveStreamingDetokenizer):
        return tokenizer, tokenizer
    return tokenizer, tokenizer_utils.load(directory, extra, eos_token_ids=eos)


def _processor_template(directory: Path) -> str | None:
    """Return the chat template of a processor: older multimodal checkpoints have no other one, and
    transformers gives it to the processor only, never to the tokenizer."""
    template = _read_json(directory / "chat_template.json").get("chat_template")
    return template if isinstance(template, str) else None


def _is_jinja(tokenizer: Any) -> bool:
    """Return whether the chat template is a model's, not a function of mlx-lm or transformers."""
    from transformers import PreTrainedTokenizerBase

    inner = getattr(tokenizer, "_tokenizer", tokenizer)
    applies = getattr(type(inner), "apply_chat_template", None)
    own = applies is PreTrainedTokenizerBase.apply_chat_template
    return own and bool(tokenizer.has_chat_template and tokenizer._chat_template is None)


def _plain(special_tokens: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: [str(each) for each in token] if isinstance(token, list | tuple) else str(token)
        for name, token in special_tokens.items()
    }


def _image_tokens(tokenizer: Any, vision: Vision | None) -> list[str]:
    """Return the texts of the tokens that stand for images, the placeholder first."""
    if vision is None:
        return []
    return [vision.placeholder, str(tokenizer.convert_ids_to_tokens(vision.image_token_id))]


def _read_json(path: Path) -> dict[str, Any]:
    """Return what is in the file ``path``; nothing if there is none, or no object in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
