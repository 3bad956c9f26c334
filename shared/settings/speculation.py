"""The settings for speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from shared.flags import flag


@dataclass(frozen=True, kw_only=True)
class SpeculationSettings:
    GROUP: ClassVar = "speculative decoding"

    spec_decode: Literal["none", "ngram", "draft", "auto"] = flag(
        "auto",
        "source of drafts: none, n-grams of earlier text, a draft model, or auto: whatever pays "
        "off, at a bounded cost for each request",
    )
    num_speculative_tokens: int = flag(
        5,
        "max draft tokens per sequence and step; with auto, measured costs decide",
        at_least=1,
        at_most=16,
    )
    spec_decode_disable_batch_size: int = flag(
        8, "with ngram and draft, do not draft while more sequences than this decode", at_least=1
    )
    ngram_max: int = flag(4, "max length of an n-gram", at_least=1, at_most=16)
    ngram_min: int = flag(1, "min length of an n-gram", at_least=1)
    ngram_prompt_lookup: bool = flag(
        True, "look up n-grams in the prompt too, not only in the answer"
    )
    draft_model_path: str | None = flag(
        None, "draft model with the same vocabulary: a directory or a Hugging Face model id"
    )
    draft_model_quantize: str | None = flag(
        None,
        "deprecated, has no effect: use a quantized draft model",
        ignored="deprecated and has no effect; use a quantized draft model",
    )
    draft_context_len: int = flag(
        128,
        "tokens at the end of a sequence that the draft model reads first",
        at_least=1,
        at_most=512,
    )
    spec_decode_dynamic: bool = flag(
        True, "choose the draft length from measured acceptance and step costs"
    )
    spec_decode_acceptance_threshold: float = flag(
        0.3,
        "min acceptance rate; a sequence below it stops drafting for a while",
        at_least=0,
        at_most=1,
    )
    adaptive_k: bool = flag(True, "measure acceptance per sequence instead of for all together")
