"""`mlx-lm-server agent NAME`: start a coding agent on a running server.

The agent is configured through its environment and command line. Its own configuration files are
neither read nor written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from services.commands.admin_client import NoServer, ServerRefused, add_server_flags
from services.commands.event_stream import StreamRefused, opened
from services.commands.parser import CommandParser
from shared.exits import EXIT_FAILED, EXIT_USAGE, fail

PROG = "mlx-lm-server agent"
KEY_VARIABLE = "MLX_LM_SERVER_API_KEY"
_FLAGS = ("-h", "--help", "--url", "--model", "--api-key")
_TIMEOUT_S = 10
_CONTEXT = 32_768
"""Context in tokens, if the server does not know it yet."""
_LONGEST_OUTPUT = 16_384
"""Max tokens of an answer, or a quarter of the context if that is less. The rest is for the
conversation."""


class Target(NamedTuple):
    """The server and model to use."""

    url: str
    model: str
    context: int  # in tokens; at most the longest prompt that the server accepts
    key: str
    sees: bool  # whether it takes images

    @property
    def max_output(self) -> int:
        return min(_LONGEST_OUTPUT, self.context // 4)


class Launch(NamedTuple):
    arguments: list[str]
    """Arguments before the user's own."""
    environment: dict[str, str]
    unset: tuple[str, ...] = ()
    """Variables that would redirect the agent elsewhere."""


def _claude(target: Target) -> Launch:
    models = ("MODEL", *(f"DEFAULT_{name}_MODEL" for name in ("OPUS", "SONNET", "HAIKU")))
    return Launch(
        [],
        {
            "ANTHROPIC_BASE_URL": target.url,
            "ANTHROPIC_AUTH_TOKEN": target.key or "none",
            **{f"ANTHROPIC_{name}": target.model for name in models},
            "CLAUDE_CODE_SUBAGENT_MODEL": target.model,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(target.context),
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it changes with each turn
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.max_output),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        unset=("ANTHROPIC_API_KEY",),
    )


def _codex(target: Target) -> Launch:
    provider = {
        "name": "mlx-lm-server",
        "base_url": f"{target.url}/v1",
        "wire_api": "responses",
        **({"env_key": KEY_VARIABLE} if target.key else {}),
    }
    settings = {
        "model": target.model,
        "model_provider": "mlx_lm_server",
        "model_context_window": target.context,
        **{f"model_providers.mlx_lm_server.{name}": value for name, value in provider.items()},
    }
    # The values are TOML, whose strings and numbers have JSON's syntax.
    pairs = (f"{name}={json.dumps(value)}" for name, value in settings.items())
    return Launch([word for pair in pairs for word in ("-c", pair)], {KEY_VARIABLE: target.key})


def _opencode(target: Target) -> Launch:
    model: dict[str, Any] = {"limit": {"context": target.context, "output": target.max_output}}
    if target.sees:  # otherwise opencode replaces images by an error
        model |= {
            "attachment": True,
            "modalities": {"input": ["text", "image"], "output": ["text"]},
        }
    config = {
        "provider": {
            "mlx-lm-server": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key or "none"},
                "models": {target.model: model},
            }
        },
        "model": f"mlx-lm-server/{target.model}",
        "small_model": f"mlx-lm-server/{target.model}",
    }
    return Launch([], {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


AGENTS: Mapping[str, Callable[[Target], Launch]] = {
    "claude": _claude,
    "codex": _codex,
    "opencode": _opencode,
}
"""By the name of the agent's command."""


def main(argv: Sequence[str]) -> int:
    """Replace this process with the agent named in ``argv``. Return the exit code of an error."""
    own, arguments = _split(argv)
    options = parser().parse_args(own)
    if shutil.which(options.agent) is None:
        return fail(PROG, f"command {options.agent!r} not found; install it first", EXIT_USAGE)
    try:
        target = _target(options.url.rstrip("/"), options.model, options.api_key)
    except LookupError as error:
        return fail(PROG, str(error), EXIT_FAILED)
    launch = AGENTS[options.agent](target)
    kept = {name: value for name, value in os.environ.items() if name not in launch.unset}
    sys.stderr.write(f"{options.agent}: {target.model} at {target.url}, {target.context} tokens\n")
    command = [options.agent, *launch.arguments, *arguments]
    os.execvpe(options.agent, command, kept | launch.environment)
    raise AssertionError  # not reached: the process runs the agent now


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return this command's own arguments (the agent's name and the flags directly after it), and
    the rest, which is the agent's. argparse would take flags out of the rest."""
    end = 1
    while end < len(argv) and argv[end].partition("=")[0] in _FLAGS:
        end += 1 if "=" in argv[end] or argv[end] in ("-h", "--help") else 2
    rest = list(argv[end:])
    return list(argv[:end]), rest[1:] if rest[:1] == ["--"] else rest


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog=PROG,
        usage="%(prog)s [-h] NAME [--url URL] [--model MODEL] [--api-key KEY] [ARGUMENTS ...]",
        description="Start a coding agent on a running server. The agent's own configuration is "
        "not changed.",
    )
    made.add_argument(
        "agent",
        metavar="NAME",
        choices=sorted(AGENTS),
        help=f"{', '.join(sorted(AGENTS))}; arguments after the flags below are passed to the "
        "agent",
    )
    add_server_flags(made, admin=False)
    made.add_argument("--model", help="model (default: the server's first model)")
    made.add_argument(
        "--api-key",
        default=os.environ.get(KEY_VARIABLE, ""),
        help=f"API key (default: ${KEY_VARIABLE})",
    )
    return made


def _target(url: str, name: str | None, key: str) -> Target:
    """Ask the server at ``url`` for the model ``name``. Raises `LookupError` with the reason."""
    try:
        with opened(f"{url}/v1/models", key, _TIMEOUT_S) as answer:
            models: list[dict[str, Any]] = json.load(answer)["data"]
        # A model that was never loaded has not reported its context yet.
        found = {
            str(each["id"]): Target(
                url,
                str(each["id"]),
                min(each[name] or _CONTEXT for name in ("context_length", "max_prompt_tokens")),
                key,
                "vision" in each["capabilities"],
            )
            for each in models
        }
    except StreamRefused as error:
        hint = ": the API key is not valid" if key else " (set --api-key)"
        hint = hint if error.status == 401 else ""
        raise LookupError(f"{error}{hint}") from None
    except (ServerRefused, NoServer) as error:
        raise LookupError(str(error)) from None
    except (ValueError, KeyError, TypeError) as error:
        raise LookupError(f"no mlx-lm-server responds at {url}: {error}") from None
    if not found:
        raise LookupError(f"the server at {url} has no ready model")
    model = next(iter(found)) if name is None else name
    if model not in found:
        raise LookupError(f"the server has no model {model!r}; its models are {', '.join(found)}")
    return found[model]
