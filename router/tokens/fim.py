"""Fill-in-the-middle (FIM): prompts that ask a model for the text between a prefix and a suffix.

Each family of code models was trained with its own layout of these prompts. The layouts, and how
other files of a repository precede them, are those of the families' model cards and papers; a
family that has none of its own for other files gets them as llama.cpp's `/infill` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from router.tokens.image_prompts import Prompt
from router.tokens.literals import literal_pattern

AUTO, NONE = "auto", "none"
"""Values of ``--fim-layout``. Any other is a layout, as in `FimFamily`."""

_LAYOUT = re.compile(r"(.+?)\{(prefix|suffix)\}(.+?)\{(prefix|suffix)\}(.*)", re.DOTALL)
_TOKEN = re.compile(r"(▁?<[^<>\s]+>|\[[A-Z]+\])")
"""What is a token in `FimFamily.start`, `FimFamily.file` and `FimFamily.current`."""


class FimFamily(NamedTuple):
    """The form of a family's prompts. In ``layout``, ``{prefix}`` and ``{suffix}`` stand for the
    text, and everything else is a token."""

    layout: str
    start: str = ""
    """Precedes other files, if there are any. Tokens and text, like the next two."""
    file: str = "\n\n--- snippet ---\n\n{text}"
    current: str = ""
    """Stands between other files and the layout. Requests do not name the file that they edit."""
    ends: tuple[str, ...] = ()
    """Tokens that end an answer, besides those above and the model's own."""
    model_type: str = ""
    """The only type of models with this form; empty: any."""
    needs: tuple[str, ...] = ()
    """Tokens by which its tokenizer differs from others with the same layout."""


_QWEN = "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"
_STARCODER = "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>"
_MELLUM = FimFamily(
    "<fim_suffix>{suffix}<fim_prefix>{prefix}<fim_middle>",
    start="<reponame>myproject",
    file="<filename>{path}\n{text}",
    current="<filename>filename\n",
    ends=("<|endoftext|>", "<fim_pad>"),
)

FAMILIES = (
    # Mellum, whose tokens are StarCoder's in another order.
    _MELLUM._replace(model_type="mellum"),
    _MELLUM._replace(model_type="llama", needs=("<|im_start|>",)),
    # StarCoder2, whose tokenizer has StarCoder's other tokens too.
    FimFamily(
        _STARCODER,
        start="<repo_name>myproject",
        file="<file_sep>{path}\n{text}",
        current="<file_sep>",
        ends=("<|endoftext|>", "<fim_pad>"),
        needs=("<file_sep>", "<repo_name>"),
    ),
    # StarCoder, StableCode, Granite Code, Granite 3.3.
    FimFamily(
        _STARCODER,
        start="<reponame>myproject",
        file="<filename>{path}\n{text}",
        current="<filename>filename\n",
        ends=("<|endoftext|>", "<file_sep>", "<fim_pad>"),
    ),
    # CodeGemma.
    FimFamily(
        _QWEN,
        file="{path}\n{text}<|file_separator|>",
        ends=("<end_of_turn>",),
        needs=("<|file_separator|>",),
    ),
    # Qwen2.5-Coder, Qwen3-Coder, Granite 4.
    FimFamily(
        _QWEN,
        start="<|repo_name|>myproject\n",
        file="<|file_sep|>{path}\n{text}",
        current="<|file_sep|>filename\n",
        ends=("<|endoftext|>", "<|fim_pad|>", "<|im_end|>"),
    ),
    # SantaCoder, Refact.
    FimFamily("<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>", ends=("<fim-pad>",)),
    # DeepSeek-Coder, DeepSeek-Coder-V2.
    FimFamily(
        "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
        file="#{path}\n{text}\n",
    ),
    # CodeLlama, as its tokenizer writes it, and as others do.
    FimFamily("▁<PRE>{prefix}▁<SUF>{suffix}▁<MID>", ends=("▁<EOT>",)),
    FimFamily("<PRE>{prefix}<SUF>{suffix}<MID>", ends=("<EOT>",)),
    # Seed-Coder.
    FimFamily("<[fim-suffix]>{suffix}<[fim-prefix]>{prefix}<[fim-middle]>"),
    # GLM-4.5 and later.
    FimFamily(
        "<|code_prefix|>{prefix}<|code_suffix|>{suffix}<|code_middle|>",
        ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    # Falcon-H1.
    FimFamily("<|prefix|>{prefix}<|suffix|>{suffix}<|middle|>"),
    # Codestral and other models of Mistral's. It was trained with other files in the prefix; before
    # the suffix, they are found in the cache when the suffix has changed.
    FimFamily(
        "[SUFFIX]{suffix}[PREFIX]{prefix}", file="+++++ {path}\n{text}\n\n", ends=("[MIDDLE]",)
    ),
)


class FimLayout(NamedTuple):
    """The form of one model's prompts, with the ids of its tokens."""

    family: FimFamily
    """Its ``layout`` may differ."""
    text: str
    """In the notation of `FimFamily.layout`."""
    tokens: tuple[int, int, int | None]
    """Those before, between and after the two texts."""
    suffix_first: bool
    ids: Mapping[str, int]
    """Of all added tokens that the form mentions."""

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer: text does not contain any token of the form."""
        return frozenset(self.ids.values())

    @property
    def has_files(self) -> bool:
        """Whether the tokenizer has the tokens that its family uses for other files."""
        family = self.family
        found = _TOKEN.findall(family.start + family.file + family.current)
        return all(token in self.ids for token in found)


def find_layout(setting: str, model_type: str, added_tokens: Mapping[str, int]) -> FimLayout | None:
    """Return the layout of a model by its ``--fim-layout``, its type and its added tokens (text to
    id); None if it has none."""
    if setting == NONE:
        return None
    families = [
        each
        for each in FAMILIES
        if each.model_type in ("", model_type) and added_tokens.keys() >= set(each.needs)
    ]
    if setting != AUTO:
        tokens = sorted(_tokens_of(setting))
        alike = (each for each in families if sorted(_tokens_of(each.layout)) == tokens)
        return _with_ids(next(alike, FimFamily("")), setting, added_tokens)
    found = (_with_ids(each, each.layout, added_tokens) for each in families)
    return next((layout for layout in found if layout is not None), None)


def _with_ids(family: FimFamily, layout: str, added_tokens: Mapping[str, int]) -> FimLayout | None:
    """Return ``layout`` with what else is in the form of ``family``; None if a token is missing."""
    match = _LAYOUT.fullmatch(layout)
    names = [token for token in _tokens_of(layout) if token]
    if match is None or len(names) < 2 or not all(name in added_tokens for name in names):
        return None
    before, between, *after = (added_tokens[name] for name in names)
    further = _TOKEN.findall(family.start + family.file + family.current)
    mentioned = {*names, *further, *family.ends} & added_tokens.keys()
    return FimLayout(
        family,
        layout,
        (before, between, after[0] if after else None),
        suffix_first=match[2] == "suffix",
        ids={name: added_tokens[name] for name in mentioned},
    )


def _tokens_of(layout: str) -> tuple[str, ...]:
    match = _LAYOUT.fullmatch(layout)
    return () if match is None else match.group(1, 3, 5)


class OtherFile(NamedTuple):
    """Another file, or a part of one, that helps to complete the text."""

    path: str
    text: str


class FimPrompts:
    """Makes the prompts of one model. Thread-safe if ``encode`` is."""

    def __init__(
        self,
        layout: FimLayout,
        *,
        bos_id: int | None,
        control_tokens: Collection[str],
        encode: Callable[[str], list[int]],
    ) -> None:
        """``bos_id`` is the token with which the model's prompts begin; ``control_tokens`` have the
        texts that must not become tokens; ``encode`` tokenizes a text without BOS."""
        self.layout = layout
        self._bos = [] if bos_id is None else [bos_id]
        self._encode = encode
        self._inner_start = _inner_start(encode)
        names = {*control_tokens, *layout.ids}
        self._control_tokens = literal_pattern(name for name in names if len(name) > 1)

    def prompts(
        self,
        prefixes: Sequence[str | Sequence[int]],
        suffix: str,
        others: Sequence[OtherFile] = (),
        *,
        room: int,
    ) -> list[Prompt]:
        """Return the prompt for the text between each of ``prefixes`` (text or tokens) and
        ``suffix``, of at most ``room`` tokens.

        What is near the gap is kept: three tokens of the prefix for one of the suffix, and more of
        one if the other is shorter. The last of ``others`` that fit beside them come first, so that
        a later request finds them in the cache.
        """
        start, between, end = self.layout.tokens
        marks = [start, between] if end is None else [start, between, end]
        left = max(0, room - len(self._bos) - len(marks))
        # One more than fits, if there are more, tells whether any are left out.
        after = self._first(suffix, left + 1)
        found = []
        for prefix in prefixes:
            before = self._last(prefix, left + 1) if isinstance(prefix, str) else list(prefix)
            num_after = min(len(after), max(left // 4, left - len(before)))
            num_before = min(len(before), left - num_after)
            texts = [before[len(before) - num_before :], after[:num_after]]
            files, are_cut = self._files(others, left - num_before - num_after)
            are_cut |= num_before < len(before) or num_after < len(after)
            if self.layout.suffix_first:
                texts.reverse()
            ids = [*self._bos, *files, start, *texts[0], between, *texts[1], *marks[2:]]
            found.append(Prompt(ids, ids, end_ids=self.layout.end_ids, is_cut=are_cut))
        return found

    def _files(self, others: Sequence[OtherFile], room: int) -> tuple[list[int], bool]:
        """Return the tokens of the last of ``others`` that fit into ``room``, oldest first, and
        whether any were left out."""
        family = self.layout.family if self.layout.has_files else FimFamily("")
        start, current = self._tokens(family.start), self._tokens(family.current)
        room -= len(start) + len(current)
        found: list[list[int]] = []
        for each in reversed(others):
            tokens = self._tokens(family.file, each, room + 1)
            if len(tokens) > room:
                break
            found.append(tokens)
            room -= len(tokens)
        if not found:
            return [], bool(others)
        files = [token for tokens in reversed(found) for token in tokens]
        return [*start, *files, *current], len(found) < len(others)

    def _tokens(
        self, form: str, other: OtherFile | None = None, most: int | None = None
    ) -> list[int]:
        """Return the tokens of ``form``, with ``other`` in its places; at least ``most`` of them,
        if there are so many."""
        found: list[int] = []
        for piece in filter(None, _TOKEN.split(form)):
            if piece in self.layout.ids:
                found.append(self.layout.ids[piece])
                continue
            if other is not None:
                # The text may contain the other place.
                head, place, tail = piece.partition("{text}")
                piece = head.replace("{path}", other.path) + (other.text if place else "") + tail
            found += self._first(piece, most)
        return found

    def _first(self, text: str, most: int | None = None) -> list[int]:
        """Return the first tokens of a text inside a prompt, as many as `_tokens`."""
        found: list[int] = []
        for piece in self._pieces(text):
            if most is not None and len(found) >= most:
                break
            found += self._encode_inner(piece)
        return found

    def _last(self, text: str, most: int) -> list[int]:
        """Return the last tokens of a prefix, at least ``most`` if it has so many.

        It begins a text: a SentencePiece tokenizer adds a space.
        """
        pieces = list(self._pieces(text))
        found: list[list[int]] = []
        for number in reversed(range(len(pieces))):
            encode = self._encode_inner if number else self._encode
            found.append(encode(pieces[number]))
            most -= len(found[-1])
            if most <= 0:
                break
        return [token for tokens in reversed(found) for token in tokens]

    def _pieces(self, text: str) -> Iterator[str]:
        """Yield ``text`` in pieces without control tokens, which are divided after their first
        character. Each is tokenized by itself."""
        begin, pattern = 0, self._control_tokens
        # Not from the end of the match: a token may contain another.
        while pattern is not None and (match := pattern.search(text, begin)) is not None:
            yield text[begin : match.start() + 1]
            begin = match.start() + 1
        if begin < len(text):
            yield text[begin:]

    def _encode_inner(self, text: str) -> list[int]:
        """Return the tokens of ``text`` without the space that a SentencePiece tokenizer adds at
        the start, as the reference code of CodeLlama and of Mistral does it."""
        if not self._inner_start:
            return self._encode(text)
        tokens, length = self._encode(_MARK + text), len(self._inner_start)
        return tokens[length:] if tokens[:length] == self._inner_start else self._encode(text)


_MARK = "☺"
"""A character whose tokens do not merge with what follows."""


def _inner_start(encode: Callable[[str], list[int]]) -> list[int]:
    """Return the tokens of `_MARK` if texts inside a prompt must follow it, or nothing if they are
    tokenized the same at the start of a text."""
    mark = encode(_MARK)
    return [] if encode(_MARK + "a")[len(mark) :] == encode("a") else mark
