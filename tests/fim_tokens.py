"""The tokens for fill-in-the-middle of tokenizers in tests: Qwen2.5-Coder's."""

from __future__ import annotations

FIM = (
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>"),
)
