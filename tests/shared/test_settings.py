"""Settings: where they come from, and what is refused."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.flags import flags_of
from shared.settings import Settings, parse

FLAGS = {one.field: one for one in flags_of(Settings)}

REFERENCE = {
    "--model": "mlx-community/Qwen3-4B-4bit",
    "--adapter-path": None,
    "--port": 8000,
    "--api-key": (),
    "--api-key-file": None,
    "--block-size": 16,
    "--num-blocks": None,
    "--kv-bits": 8,
    "--kv-group-size": 64,
    "--max-kv-size": None,
    "--sequence-cache-size": 50,
    "--ssd-cache-dir": Path("~/.cache/mlx-lm-server/kv-cache").expanduser(),
    "--no-ssd": False,
    "--ssd-ttl-days": 7,
    "--ssd-policy": "evict_only",
    "--ssd-durability": "best_effort",
    "--ssd-async-writes": True,
    "--ssd-writer-queue-size": 512,
    "--ssd-persistent-max-retries": 3,
    "--ssd-flush-interval-s": 1.0,
    "--ssd-max-size-gb": 50.0,
    "--max-batch-size": 8,
    "--prefill-batch-size": 4,
    "--max-queue-size": 128,
    "--completion-batch-size": 32,
    "--max-generation-tokens": 32768,
    "--request-timeout-s": 120.0,
    "--first-token-timeout-s": 300.0,
    "--max-concurrent-requests": 64,
    "--memory-pressure-threshold": 0.9,
    "--num-speculative-tokens": 5,
    "--spec-decode-disable-batch-size": 8,
    "--ngram-max": 4,
    "--ngram-min": 1,
    "--ngram-prompt-lookup": True,
    "--draft-model-path": None,
    "--draft-model-quantize": None,
    "--draft-context-len": 128,
    "--spec-decode-dynamic": True,
    "--spec-decode-acceptance-threshold": 0.3,
    "--adaptive-k": True,
    "--distributed-mode": "off",
    "--distributed-sharding": "tensor",
    "--distributed-strict": True,
    "--distributed-hostfile": None,
    "--distributed-ibv-devices": None,
    "--distributed-jaccl-coordinator": None,
    "--num-local-ranks": None,
}
"""The flags of the reference, and their defaults, except ``--spec-decode``: drafts change no text,
and cost no request more than a little."""

Refusal = Callable[..., str]
NOT_UTF8 = os.fsdecode(b"ipc:///tmp/\xff")
TWO_RANKS = "--distributed-mode ring --num-local-ranks 2"
JACCL, DRAFTS = "--distributed-mode jaccl", "--spec-decode draft --draft-model-path x"


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Return a function that returns the one line with which flags are refused."""

    def refusal(*argv: str, **environ: str) -> str:
        with pytest.raises(SystemExit) as caught:
            parse(argv, environ, "prog")
        out, error = capsys.readouterr()
        assert (caught.value.code, out) == (2, "")
        assert error.startswith("prog: ") and error.endswith("\n") and error.count("\n") == 1
        return error.removeprefix("prog: ")

    return refusal


def test_flags_of_the_reference_have_their_names_and_defaults() -> None:
    settings = parse([], {}, "prog")
    found = {name: getattr(settings, name[2:].replace("-", "_")) for name in REFERENCE}
    assert found == REFERENCE
    assert settings == Settings()
    # The model decides these, which are fixed in the reference (ARCHITECTURE.md).
    assert settings.max_request_bytes is settings.max_prompt_tokens is None
    assert settings.default_max_tokens is None


def test_the_whole_help_names_every_flag_its_variable_and_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help-all"], {}, "prog")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for one in FLAGS.values():
        assert f" --{one.name} " in text
        assert f"${one.variable}" in text
        assert one.declared.help in text
    assert text.count("(default: ") >= len(FLAGS)


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('port = 1\nmax-queue-size = 1\nblock_size = 32\nserved-model-name = ["a"]\n')
    environ = {"MLX_LM_SERVER_PORT": "2", "MLX_LM_SERVER_MAX_QUEUE_SIZE": "2"}
    settings = parse(["--config", str(file), "--port", "3"], environ, "prog")
    assert (settings.port, settings.max_queue_size, settings.block_size) == (3, 2, 32)
    assert settings.served_model_name == ("a",)
    assert settings.max_batch_size == Settings().max_batch_size


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[chat-template-args]\nenable_thinking = false\n")
    settings = parse([], {"MLX_LM_SERVER_CONFIG": str(file)}, "prog")
    assert settings.chat_template_args == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ([], {}, True),
        (["--no-ssd-async-writes"], {}, False),
        (["--ssd-async-writes"], {"MLX_LM_SERVER_SSD_ASYNC_WRITES": "false"}, True),
        ([], {"MLX_LM_SERVER_SSD_ASYNC_WRITES": "0"}, False),
        ([], {"MLX_LM_SERVER_NO_SSD_ASYNC_WRITES": "1"}, False),
        ([], {"MLX_LM_SERVER_SSD_ASYNC_WRITES": ""}, True),
    ],
)
def test_a_boolean_is_switched_by_either_of_its_names(
    argv: list[str], environ: dict[str, str], expected: bool
) -> None:
    assert parse(argv, environ, "prog").ssd_async_writes is expected


def test_no_ssd_is_a_flag_of_its_own() -> None:
    assert parse(["--no-ssd"], {}, "prog").no_ssd is True
    assert parse(["--ssd"], {"MLX_LM_SERVER_NO_SSD": "yes"}, "prog").no_ssd is False


def test_lists_are_repeated_flags_or_commas_in_the_environment() -> None:
    flags = ["--served-model-name", "a", "--served-model-name=b"]
    assert parse(flags, {}, "prog").served_model_name == ("a", "b")
    environ = {"MLX_LM_SERVER_CORS_ORIGIN": "https://a.example, https://b.example:8443"}
    assert parse([], environ, "prog").cors_origin == ("https://a.example", "https://b.example:8443")
    assert parse([], {"MLX_LM_SERVER_API_KEY": "one,key"}, "prog").api_key == ("one,key",)


def test_auto_stands_for_what_the_device_decides() -> None:
    settings = parse(["--num-blocks", "auto", "--prefill-chunk-tokens", "64"], {}, "prog")
    assert (settings.num_blocks, settings.prefill_chunk_tokens) == (None, 64)


@pytest.mark.parametrize(
    ("flags", "source"),
    [("--spec-decode draft ", "draft"), ("--spec-decode auto ", "auto"), ("", "auto")],
)
def test_a_draft_model_is_taken_with_its_flags(flags: str, source: str) -> None:
    argv = f"{flags}--draft-model-path x --draft-context-len 64"
    settings = parse(argv.split(), {}, "prog")
    assert (settings.spec_decode, settings.draft_model_path) == (source, "x")
    assert settings.draft_context_len == 64


@pytest.mark.parametrize("source", ["ngram", "auto"])
def test_a_source_of_drafts_is_taken_with_all_its_flags(source: str) -> None:
    argv = f"--spec-decode {source} --ngram-min 2 --ngram-max 3 --no-ngram-prompt-lookup"
    argv += " --num-speculative-tokens 4 --no-adaptive-k --no-spec-decode-dynamic"
    settings = parse(argv.split(), {}, "prog")
    assert (settings.spec_decode, settings.ngram_min, settings.ngram_max) == (source, 2, 3)
    assert (settings.num_speculative_tokens, settings.adaptive_k) == (4, False)
    assert not settings.ngram_prompt_lookup and not settings.spec_decode_dynamic


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--port x", "--port: 'x' is not a whole number"),
        ("--port 65536", "--port: 65536 is greater than 65535"),
        ("--port 1.5", "--port: '1.5' is not a whole number"),
        ("--port", "--port: expected one argument"),
        ("--model ''", "--model: empty"),
        ("--num-blocks 0", "--num-blocks: 0 is less than 1"),
        ("--block-size 0", "--block-size: 0 is less than 1"),
        ("--request-timeout-s 0", "--request-timeout-s: 0.0 must be greater than 0"),
        ("--temperature nan", "--temperature: 'nan' is not a finite number"),
        ("--memory-pressure-threshold 1.1", "--memory-pressure-threshold: 1.1 is greater than 1"),
        ("--ssd-flush-interval-s 1e12", "--ssd-flush-interval-s: 1000000000000.0 is greater than"),
        ("--ssd-max-size-gb 1e300", "--ssd-max-size-gb: 1e+300 is greater than 1000000000"),
        ("--disk-reserve-gb 1e300", "--disk-reserve-gb: 1e+300 is greater than 1000000000"),
        (f"--ssd-ttl-days 1{'0' * 400}", "--ssd-ttl-days: 1000"),
        ("--ssd-writer-queue-size 1000001", "--ssd-writer-queue-size: 1000001 is greater than"),
        ("--kv-bits 5", "--kv-bits: '5' is not one of 4, 8, 16"),
        ("--kv-group-size 48", "--kv-group-size: '48' is not one of 16, 32, 64, 128"),
        ("--ssd-policy lru", "--ssd-policy: 'lru' is not one of evict_only, write_through"),
        ("--chat-template-args '{'", "--chat-template-args: not valid JSON: "),
        ("--chat-template-args '[1]'", "--chat-template-args: not a JSON object"),
        ("--api-key-file /nonexistent", "--api-key-file: /nonexistent is not a readable file"),
        ("--config /nonexistent", "--config: cannot read /nonexistent: "),
        ("--fim-layout '<A>{prefix}<B>'", "--fim-layout: must be auto, none, or tokens around"),
        ("--fim-layout '{prefix}<A>{prefix}'", "--fim-layout: must be auto, none, or tokens"),
        ("--prot 1", "unknown flag --prot (did you mean --port?)"),
        ("--no-port", "unknown flag --no-port (did you mean --port?)"),
        ("model", "unexpected argument 'model'"),
        ("--max-batch-size 40", "--max-batch-size: 40 is greater than --completion-batch-size"),
        ("--ngram-min 5", "--ngram-min: 5 is greater than --ngram-max, which is 4"),
        ("--default-max-tokens 40000", "--default-max-tokens: 40000 is greater than --max-gen"),
        (f"--ssl-keyfile {__file__}", "--ssl-keyfile: requires --ssl-certfile"),
        ("--root-path api/", "--root-path: must begin with /"),
        ("--cors-origin example.com", "--cors-origin: 'example.com' is not an origin"),
        ("--api-key 'a b'", "--api-key: only printable ASCII"),
        ("--engine-socket ipc://relative", "--engine-socket: 'ipc://relative' is not"),
        (f"--engine-socket ipc:///{'x' * 103}", "--engine-socket: the path is longer than 103"),
        ("--engine-socket inproc://x", "--engine-socket: 'inproc://x' is neither"),
        (
            "--engine-socket dns+tcp://:5 --curve-dir /x",
            "--engine-socket: 'dns+tcp://:5' is neither",
        ),
        ("--kvstore-socket dns+tcp://a:5", "--kvstore-socket: 'dns+tcp://a:5' is neither"),
        ("--kvstore-socket tcp://h", "--kvstore-socket: 'tcp://h' is neither"),
        ("--kvstore-socket tcp://127.0.0.1:²", "--kvstore-socket: 'tcp://127.0.0.1:²' is neither"),
        (f"--engine-socket tcp://127.0.0.1:{5000 * '9'}", "--engine-socket: 'tcp://127.0.0.1:9"),
        (f"--engine-socket {NOT_UTF8}", "--engine-socket: contains bytes that are not UTF-8"),
        (f"--model {NOT_UTF8}", "--model: contains bytes that are not UTF-8"),
        (f"--ssd-cache-dir {NOT_UTF8}", "--ssd-cache-dir: contains bytes that are not UTF-8"),
        (
            """--chat-template-args '{"a": "\\ud800"}'""",
            "--chat-template-args: contains half of a surrogate pair",
        ),
        ("--kvstore-socket tcp://0.0.0.0:5555", "--kvstore-socket: 0.0.0.0 is another"),
        ("--engine-socket 'tcp://*:5555'", "--engine-socket: * is another machine"),
        ("--num-local-ranks 2", "--num-local-ranks: requires --distributed"),
        ("--distributed-mode ring", "--distributed-mode: requires --num-local-ranks or"),
        (f"{JACCL} --distributed-hostfile /none", "--distributed-hostfile: /none cannot be read"),
        (
            f"{JACCL} --num-local-ranks 2",
            "--num-local-ranks: jaccl connects ranks on different machines",
        ),
        (
            "--distributed-sharding pipeline",
            "--distributed-sharding: 'pipeline' is not one of tensor",
        ),
        (f"{TWO_RANKS} --adapter-path x", "--adapter-path: adapters cannot be split"),
        (f"{TWO_RANKS} --max-adapters 2", "--max-adapters: adapters cannot be split"),
        (f"{TWO_RANKS} {DRAFTS}", "--draft-model-path: not supported"),
        ("--spec-decode draft", "--spec-decode: draft requires --draft-model-path"),
        ("--draft-model-path x --spec-decode none", "--draft-model-path: has no effect without"),
        ("--draft-model-path x --spec-decode ngram", "--draft-model-path: has no effect without"),
        (f"{DRAFTS} --draft-context-len 513", "--draft-context-len: 513 is greater than 512"),
    ],
)
def test_an_invalid_value_is_one_line_that_names_the_flag(
    argv: str, message: str, refusal: Refusal
) -> None:
    assert refusal(*shlex.split(argv)).startswith(message)


def test_every_number_has_a_lower_limit(refusal: Refusal) -> None:
    for one in FLAGS.values():
        if one.kind in (int, float) and not one.choices:
            assert refusal(f"--{one.name}=-1").startswith(f"--{one.name}: ")


def test_a_bad_variable_is_named(refusal: Refusal) -> None:
    assert refusal(MLX_LM_SERVER_PORT="x").startswith("--port ($MLX_LM_SERVER_PORT): ")


def test_a_boolean_set_by_both_of_its_names_is_refused(refusal: Refusal) -> None:
    line = refusal(MLX_LM_SERVER_SSD="1", MLX_LM_SERVER_NO_SSD="1")
    assert line.startswith("--no-ssd: both ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot = 1", "--config: unknown key 'prot' in {} (did you mean port?)"),
        ("[server]\nport = 1", "--config: unknown key 'server' in {}"),
        ('port = "x"', "--port (key 'port' in {}): 'x' is not a whole number"),
        ("port = true", "--port (key 'port' in {}): True is not a whole number"),
        ("no-ssd = 3", "--no-ssd (key 'no-ssd' in {}): 3 is neither true nor false"),
        ("model = 3", "--model (key 'model' in {}): not a string"),
        ("cors-origin = 3", "--cors-origin (key 'cors-origin' in {}): neither a string"),
        ("block-size = 8\nblock_size = 8", "--block-size: set twice in {}"),
        ("kv-bits = 5", "--kv-bits (key 'kv-bits' in {}): 5 is not one of 4, 8, 16"),
        ("port =", "--config: {} is not valid TOML: "),
        ("port = " + 5000 * "9", "--config: {} is not valid TOML: "),
        ("port = " + 100_000 * "[", "--config: {} is not valid TOML: "),
        ("temperature = " + 400 * "9", "--temperature (key 'temperature' in {}): 9"),
        ('model = "a\\u0000b"', "--model (key 'model' in {}): contains a NUL character"),
        ("[chat-template-args]\nday = 2026-01-01", "--chat-template-args (key "),
        (
            '[[model]]\nid = "a\\nb"',
            "--config: id of [[model]] number 1 of {} must be a non-empty string",
        ),
    ],
)
def test_an_error_in_a_file_names_file_and_key(
    content: str, message: str, tmp_path: Path, refusal: Refusal
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(content)
    assert refusal("--config", str(file)).startswith(message.format(file))


def test_a_flag_without_effect_and_an_unknown_variable_are_warnings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    environ = {"MLX_LM_SERVER_PROT": "1", "MLX_LM_SERVER_URL": "http://127.0.0.1:8000"}
    parse(["--draft-model-quantize", "4bit"], environ, "prog")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "prog: warning: $MLX_LM_SERVER_PROT is not a setting"
    assert not any("MLX_LM_SERVER_URL" in line for line in lines)
    assert lines[1].startswith("prog: warning: --draft-model-quantize: deprecated")


def test_a_child_process_does_not_repeat_the_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    parse(["--draft-model-quantize", "x"], {"_MLX_LM_SERVER_LINK_FD": "3"}, "prog")
    assert capsys.readouterr().err == ""


def test_tcp_is_allowed_on_the_loopback_only() -> None:
    for address in ("tcp://127.0.0.1:5555", "tcp://[::1]:5555", "tcp://localhost:5555"):
        assert parse(["--engine-socket", address], {}, "prog").engine_socket == (address,)


def test_secrets_are_never_shown(refusal: Refusal) -> None:
    keys = ["--api-key", "hunter2", "--metrics-key", "swordfish", "--admin-key", "sesame"]
    settings = parse(keys, {}, "prog")
    assert settings.api_key == ("hunter2",)
    for shown in (repr(settings), refusal(*keys, "--port", "x")):
        assert not any(secret in shown for secret in keys[1::2])
