"""The values of `--tool-parser` and `--reasoning-parser`."""

from __future__ import annotations

from typing import Literal

ToolParserName = Literal[
    "auto",
    "none",
    "json",
    "harmony",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "function_gemma",
    "gemma4",
    "glm47",
    "granite",
    "jamba",
    "json_tools",
    "kimi_k2",
    "kimi_k3",
    "laguna",
    "longcat",
    "minicpm5",
    "minimax_m2",
    "minimax_m3",
    "mistral",
    "muse_spark",
    "nemotron",
    "phi4_mini",
    "pythonic",
    "qwen3_coder",
    "seed_oss",
]
ReasoningParserName = Literal[
    "auto",
    "none",
    "harmony",
    "think",
    "gemma4",
    "kimi_k3",
    "longcat",
    "minimax_m3",
    "mistral",
    "seed_oss",
]
