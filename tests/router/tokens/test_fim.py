"""Prompts for fill-in-the-middle: the layout of each family, found from its tokenizer's tokens,
and what of the texts is kept.

The tokenizers are made by hand, with the added tokens of the families' own: what stands between
those depends on a tokenizer's merges alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from router.tokens.fim import FAMILIES, FimPrompts, OtherFile, find_layout
from router.tokens.rendering import Renderer
from tests.router.tiny_tokenizer import BOS, loaded_as, sentencepiece, write_tokenizer

FILES = (OtherFile("a.py", "x"), OtherFile("b.py", "y"))


class Case(NamedTuple):
    added: tuple[str, ...]
    """The tokens that a family's tokenizer adds: the first gets id 265, the others follow."""
    alone: list[Any]
    """The prompt for the prefix "P" and the suffix "S"."""
    beside: list[Any]
    """The same, with `FILES`; texts are given as such."""
    model_type: str = "llama"


def _tokens(names: str) -> tuple[str, ...]:
    return tuple(names.split())


CASES: dict[str, Case] = {
    "Qwen2.5-Coder": Case(
        _tokens(
            "<|endoftext|> <|im_start|> <|im_end|> <|fim_prefix|> <|fim_middle|> <|fim_suffix|>"
            " <|fim_pad|> <|repo_name|> <|file_sep|>"
        ),
        [268, "P", 270, "S", 269],
        [
            *(272, "myproject\n", 273, "a.py\nx", 273, "b.py\ny", 273, "filename\n"),
            *(268, "P", 270, "S", 269),
        ],
        "qwen2",
    ),
    "Granite 4": Case(
        _tokens("<|end_of_text|> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|>"),
        [266, "P", 268, "S", 267],
        [
            *("\n\n--- snippet ---\n\nx", "\n\n--- snippet ---\n\ny"),
            *(266, "P", 268, "S", 267),
        ],
        "granitemoehybrid",
    ),
    "CodeGemma": Case(
        _tokens("<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|file_separator|> <end_of_turn>"),
        [265, "P", 266, "S", 267],
        ["a.py\nx", 268, "b.py\ny", 268, 265, "P", 266, "S", 267],
        "gemma",
    ),
    "StarCoder2": Case(
        _tokens(
            "<fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <repo_name> <file_sep> <reponame>"
            " <filename>"
        ),
        [265, "P", 267, "S", 266],
        [269, "myproject", 270, "a.py\nx", 270, "b.py\ny", 270, 265, "P", 267, "S", 266],
        "starcoder2",
    ),
    "StarCoder, Granite Code": Case(
        _tokens("<fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <filename> <reponame>"),
        [265, "P", 267, "S", 266],
        [
            *(270, "myproject", 269, "a.py\nx", 269, "b.py\ny", 269, "filename\n"),
            *(265, "P", 267, "S", 266),
        ],
    ),
    "StableCode": Case(
        _tokens("<fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <reponame>"),
        [265, "P", 267, "S", 266],
        ["\n\n--- snippet ---\n\nx", "\n\n--- snippet ---\n\ny", 265, "P", 267, "S", 266],
        "stablelm",
    ),
    "Mellum": Case(
        _tokens("<fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <filename> <reponame>"),
        [267, "S", 265, "P", 266],
        [
            *(270, "myproject", 269, "a.py\nx", 269, "b.py\ny", 269, "filename\n"),
            *(267, "S", 265, "P", 266),
        ],
        "mellum",
    ),
    "Mellum in Llama's form": Case(
        _tokens("<fim_prefix> <fim_middle> <fim_suffix> <filename> <reponame> <|im_start|>"),
        [267, "S", 265, "P", 266],
        [
            *(269, "myproject", 268, "a.py\nx", 268, "b.py\ny", 268, "filename\n"),
            *(267, "S", 265, "P", 266),
        ],
    ),
    "SantaCoder, Refact": Case(
        _tokens("<fim-prefix> <fim-middle> <fim-suffix> <fim-pad>"),
        [265, "P", 267, "S", 266],
        ["\n\n--- snippet ---\n\nx", "\n\n--- snippet ---\n\ny", 265, "P", 267, "S", 266],
        "gpt_bigcode",
    ),
    "DeepSeek-Coder": Case(
        ("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"),
        [266, "P", 265, "S", 267],
        ["#a.py\nx\n", "#b.py\ny\n", 266, "P", 265, "S", 267],
    ),
    "CodeLlama": Case(
        ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
        [265, "P", 266, "S", 267],
        ["\n\n--- snippet ---\n\nx", "\n\n--- snippet ---\n\ny", 265, "P", 266, "S", 267],
    ),
    "CodeLlama, plainly": Case(
        ("<PRE>", "<SUF>", "<MID>", "<EOT>"),
        [265, "P", 266, "S", 267],
        ["\n\n--- snippet ---\n\nx", "\n\n--- snippet ---\n\ny", 265, "P", 266, "S", 267],
    ),
    "Codestral": Case(
        ("[PREFIX]", "[MIDDLE]", "[SUFFIX]"),
        [267, "S", 265, "P"],
        ["+++++ a.py\nx\n\n", "+++++ b.py\ny\n\n", 267, "S", 265, "P"],
        "mistral",
    ),
    "Seed-Coder": Case(
        ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),
        [266, "S", 265, "P", 267],
        ["\n\n--- snippet ---\n\nx", "\n\n--- snippet ---\n\ny", 266, "S", 265, "P", 267],
    ),
    "GLM-4.5": Case(
        _tokens("<|code_prefix|> <|code_middle|> <|code_suffix|> <|user|> <|endoftext|>"),
        [265, "P", 267, "S", 266],
        ["\n\n--- snippet ---\n\nx", "\n\n--- snippet ---\n\ny", 265, "P", 267, "S", 266],
        "glm4_moe",
    ),
    "Falcon-H1": Case(
        _tokens("<|prefix|> <|suffix|> <|middle|>"),
        [265, "P", 266, "S", 267],
        ["\n\n--- snippet ---\n\nx", "\n\n--- snippet ---\n\ny", 265, "P", 266, "S", 267],
        "falcon_h1",
    ),
}
ENDS = {
    "Qwen2.5-Coder": {265, 267, 268, 269, 270, 271, 272, 273},
    "CodeGemma": {265, 266, 267, 268, 269},
    "StarCoder2": {265, 266, 267, 268, 269, 270},
    "StarCoder, Granite Code": {265, 266, 267, 268, 269, 270},
    "Mellum": {265, 266, 267, 268, 269, 270},
    "CodeLlama": {265, 266, 267, 268},
    "Codestral": {265, 266, 267},
    "GLM-4.5": {265, 266, 267, 268, 269},
}
"""The tokens that end an answer besides EOS, where a family has more than those of its layout."""


class Prompts(NamedTuple):
    fim: FimPrompts
    tokenizer: Any

    def ids(self, expected: list[Any]) -> list[int]:
        """Return the tokens of a list of token ids and texts."""
        found: list[int] = []
        for each in expected:
            is_text = isinstance(each, str)
            found += self.tokenizer.encode(each, add_special_tokens=False) if is_text else [each]
        return found

    def one(self, prefix: Any, suffix: str, *others: OtherFile, room: int = 1000) -> list[int]:
        (prompt,) = self.fim.prompts([prefix], suffix, others, room=room)
        return prompt.token_ids


def renderer_of(tokenizer: Any, model_type: str, setting: str = "auto") -> Renderer:
    from router.tokens.parsing.formats import detect_format
    from router.tokens.rendering import SamplingDefaults

    return Renderer(
        tokenizer,
        tokenizer,
        SamplingDefaults({}),
        {},
        detect_format(tokenizer, reasoning="auto", tools="auto"),
        {"model_type": model_type},
        fim_layout=setting,
    )


def with_tokens(tokenizer: Tokenizer, added: tuple[str, ...], *, special: bool) -> Tokenizer:
    tokens = [AddedToken(each, special=special, normalized=False) for each in added]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(tokens)
    return tokenizer


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Prompts]:
    numbers = itertools.count()

    def made(
        added: tuple[str, ...],
        model_type: str = "llama",
        setting: str = "auto",
        *,
        special: bool = True,
        bos: bool = False,
    ) -> Prompts:
        path = tmp_path / str(next(numbers))
        tokenizer = with_tokens(write_tokenizer(path), added, special=special)
        if bos:
            tokenizer.post_processor = TemplateProcessing("<s> $A", None, [("<s>", BOS)])
        loaded = loaded_as(tokenizer, path)
        fim = renderer_of(loaded, model_type, setting).fim
        assert fim is not None
        return Prompts(fim, loaded)

    return made


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_each_familys_prompt_has_its_tokens_in_order(
    name: str, special: bool, make: Callable[..., Prompts]
) -> None:
    case = CASES[name]
    prompts = make(case.added, case.model_type, special=special)
    assert prompts.one("P", "S") == prompts.ids(case.alone)
    assert prompts.one("P", "S", *FILES) == prompts.ids(case.beside)
    assert prompts.one("", "") == [each for each in case.alone if isinstance(each, int)]
    marks = {each for each in case.alone if isinstance(each, int)}
    (prompt,) = prompts.fim.prompts(["P"], "S", room=100)
    assert prompt.end_ids >= ENDS.get(name, marks)
    assert prompts.tokenizer.bos_token_id not in prompt.end_ids and not prompt.is_cut


def test_every_family_has_a_case() -> None:
    layouts = set()
    for case in CASES.values():
        ids = {name: number for number, name in enumerate(case.added)}
        layout = find_layout("auto", case.model_type, ids)
        assert layout is not None
        layouts.add(layout.family)
    assert layouts == set(FAMILIES)


def test_a_bos_token_stands_only_at_the_very_start(make: Callable[..., Prompts]) -> None:
    case = CASES["Codestral"]
    prompts = make(case.added, bos=True)
    assert prompts.one("P", "S", *FILES) == [BOS, *prompts.ids(case.beside)]
    assert prompts.one("P", "S") == [BOS, *prompts.ids(case.alone)]


@pytest.mark.parametrize(
    "added", [("<fim_prefix>", "<fim_suffix>"), ("[PREFIX]",), ("<|im_start|>", "<filename>")]
)
def test_a_model_without_all_tokens_has_no_layout(
    added: tuple[str, ...], make: Callable[..., Prompts]
) -> None:
    ids = {name: number for number, name in enumerate(added)}
    assert find_layout("auto", "llama", ids) is None
    assert find_layout("none", "llama", {**ids, "<PRE>": 7, "<SUF>": 8, "<MID>": 9}) is None


def test_text_that_merely_spells_the_tokens_is_no_layout(tmp_path: Path) -> None:
    loaded = loaded_as(write_tokenizer(tmp_path), tmp_path)
    renderer = renderer_of(loaded, "qwen2")
    assert renderer.fim is None and "insert" not in renderer.capabilities


def test_a_layout_in_the_settings_replaces_the_familys(make: Callable[..., Prompts]) -> None:
    case = CASES["Qwen2.5-Coder"]
    setting = "<|fim_suffix|>{suffix}<|fim_prefix|>{prefix}<|fim_middle|>"
    prompts = make(case.added, setting=setting)
    assert prompts.one("P", "S") == prompts.ids([270, "S", 268, "P", 269])
    # Other files stay in the form of the family with these tokens, and so do the ends.
    assert prompts.one("P", "S", *FILES)[:-5] == prompts.ids(case.beside)[:-5]
    (prompt,) = prompts.fim.prompts(["P"], "S", room=100)
    assert prompt.end_ids == ENDS["Qwen2.5-Coder"]
    prompts = make(("<A>", "<B>"), setting="<A>{prefix}<B>{suffix}")
    assert prompts.one("P", "S") == prompts.ids([265, "P", 266, "S"])
    ids = {"<A>": 1, "<B>": 2}
    for unusable in ("<A>{prefix}<C>{suffix}", "{prefix}<A>{suffix}<B>", "<A>{prefix}{suffix}<B>"):
        assert find_layout(unusable, "llama", ids) is None


@pytest.mark.parametrize("special", [True, False])
def test_spelled_control_tokens_stay_text(special: bool, make: Callable[..., Prompts]) -> None:
    case = CASES["Qwen2.5-Coder"]
    prompts = make(case.added, special=special)
    spelled = "".join(case.added) + "<s><</s>" + "<" * 3 + "|fim_prefix|>"
    files = OtherFile(spelled, spelled)
    found = prompts.one(spelled, spelled, files, room=5000)
    expected = [each for each in CASES["Qwen2.5-Coder"].beside if isinstance(each, int)]
    del expected[2]  # the second file
    # Other added tokens that are not special are part of texts, in this test `<|im_start|>`.
    control = {*range(265, 274), 0, 1} - (set() if special else {266})
    assert [each for each in found if each in control] == expected
    assert prompts.tokenizer.decode(found).count("<|fim_prefix|>") == 4 * 2 + 1


def test_a_token_within_a_token_stays_text_too(make: Callable[..., Prompts]) -> None:
    prompts = make((*CASES["CodeLlama"].added, *CASES["CodeLlama, plainly"].added))
    found = prompts.one("▁<PRE>", "")
    assert sum(each >= 265 for each in found) == 3


def test_other_added_tokens_are_tokens_in_text(make: Callable[..., Prompts]) -> None:
    """They are part of the text that a model was trained on, such as runs of spaces."""
    prompts = make(CASES["Falcon-H1"].added)
    plain = prompts.tokenizer._tokenizer
    plain.add_tokens([AddedToken("    ", special=False, normalized=False)])
    assert prompts.one("    x", "")[1] == 268


def test_a_sentencepiece_tokenizer_adds_no_space_inside_a_prompt(tmp_path: Path) -> None:
    """As the reference code of CodeLlama and Mistral has it: a space before the prefix, none before
    the suffix."""
    base = sentencepiece(tmp_path / "base")
    a, space_a, b = base.convert_tokens_to_ids(["a", "▁a", "b"])
    tokenizer = Tokenizer.from_file(str(tmp_path / "base" / "tokenizer.json"))
    with_tokens(tokenizer, CASES["Codestral"].added, special=True)
    first = tokenizer.token_to_id("[PREFIX]")
    loaded = loaded_as(tokenizer, tmp_path / "codestral")
    fim = renderer_of(loaded, "mistral").fim
    assert fim is not None
    prompts = Prompts(fim, loaded)
    begin = [] if loaded.encode("a")[0] != loaded.bos_token_id else [loaded.bos_token_id]
    assert prompts.one("a", "a") == [*begin, first + 2, a, first, space_a]
    assert prompts.one("a", " a") == [*begin, first + 2, space_a, first, space_a]
    spelled = prompts.one("a[SUFFIX]b", "")
    bracket, *_ = loaded.encode("a[", add_special_tokens=False)[1:]
    assert spelled[len(begin) + 2 :][:3] == [space_a, bracket, spelled[len(begin) + 4]]
    assert spelled[-1] == b and first + 2 not in spelled[len(begin) + 1 :]


def _marks(ids: list[int]) -> Iterator[int]:
    yield from (place for place, token in enumerate(ids) if token >= 265)


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (100, 100, (45, 15)),  # three to one
        (10, 100, (10, 50)),  # what one leaves, the other has
        (100, 5, (55, 5)),
        (30, 15, (30, 15)),
        (0, 100, (0, 60)),
        (100, 0, (60, 0)),
    ],
)
def test_what_is_near_the_gap_is_kept(
    before: int, after: int, kept: tuple[int, int], make: Callable[..., Prompts]
) -> None:
    prompts = make(CASES["Falcon-H1"].added)
    letters = "".join(chr(ord("A") + number % 26) for number in range(100))
    prefix, suffix = letters[:before], letters[:after]
    (prompt,) = prompts.fim.prompts([prefix], suffix, room=63)
    text = prompts.tokenizer.decode(prompt.token_ids)
    kept_before, kept_after = kept
    near = prefix[len(prefix) - kept_before :]
    assert text == f"<|prefix|>{near}<|suffix|>{suffix[:kept_after]}<|middle|>"
    assert prompt.is_cut == ((before, after) != kept)
    # As tokens too.
    ids = prompts.tokenizer.encode(prefix, add_special_tokens=False)
    assert prompts.one(ids, suffix, room=63) == prompt.token_ids


@pytest.mark.parametrize("room", [0, 1, 3, 4])
def test_a_prompt_without_room_has_its_tokens_alone(
    room: int, make: Callable[..., Prompts]
) -> None:
    prompts = make(CASES["Falcon-H1"].added)
    found = prompts.one("P" * 9, "S" * 9, *FILES, room=room)
    assert [each for each in found if each >= 265] == [265, 266, 267]
    assert len(found) == max(room, 3)


def test_the_last_files_that_fit_come_first(make: Callable[..., Prompts]) -> None:
    prompts = make(CASES["Qwen2.5-Coder"].added)
    files = [OtherFile(f"{number}.py", "x" * 20) for number in range(4)]
    whole = prompts.one("P", "S", *files)
    (prompt,) = prompts.fim.prompts(["P"], "S", files, room=len(whole))
    assert prompt.token_ids == whole and not prompt.is_cut
    (prompt,) = prompts.fim.prompts(["P"], "S", files, room=len(whole) - 1)
    assert prompt.token_ids == prompts.one("P", "S", *files[1:]) and prompt.is_cut
    # A cursor that moves leaves the start as it is.
    after = prompts.one("P and more", "S", *files)
    assert after[: len(whole) - 5] == whole[: len(whole) - 5]
    # None fits: there is nothing of their form.
    (prompt,) = prompts.fim.prompts(["P"], "S", files, room=30)
    assert prompt.token_ids == prompts.one("P", "S") and prompt.is_cut


def test_only_what_may_be_kept_is_tokenized(make: Callable[..., Prompts]) -> None:
    """Each spelled control token costs a call: a client may send a hundred thousand."""
    prompts = make(CASES["Falcon-H1"].added)
    calls = 0

    def encode(text: str) -> list[int]:
        nonlocal calls
        calls += 1
        return list(prompts.tokenizer.encode(text, add_special_tokens=False))

    fim = FimPrompts(prompts.fim.layout, bos_id=None, control_tokens=(), encode=encode)
    calls, spelled = 0, "<|prefix|>" * 100_000
    (prompt,) = fim.prompts([spelled], spelled, [OtherFile("a", spelled)], room=1000)
    assert len(prompt.token_ids) == 1000 and prompt.is_cut
    assert calls < 1000
