"""What makes a start shorter does not change what is loaded."""

import os
import subprocess
import sys
import time
from pathlib import Path

from engine.model.starting import StartTimes

LOADING = """
import gc
import sys
from pathlib import Path

from engine.backend.blas import load_fast_blas
from engine.model.starting import lean_imports

load_fast_blas()
with lean_imports():
    from engine.model.load import load

    loaded = load(Path(sys.argv[1]))
assert gc.isenabled()
print(type(loaded.tokenizer._tokenizer).__name__, loaded.tokenizer.encode("Hello, you"))
"""
NAMES = """
import sys

from shared.imports.transformers_index import remember_transformers

if sys.argv[1] == "remembered":
    remember_transformers()
finders = sys.meta_path[:]
import transformers
from transformers import AutoTokenizer, LlamaConfig
from transformers.models import qwen2

assert sys.meta_path[: len(finders)] == finders  # other threads go through it meanwhile
print(sorted(dir(transformers)))
print(sorted(dir(transformers.models)))
print(LlamaConfig().model_type, AutoTokenizer.__module__, sorted(dir(qwen2)))
"""


def output_of(program: str, argument: str, cache: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, argument],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_transformers_is_the_same_with_an_index(llama: Path, tmp_path: Path) -> None:
    plain = output_of(NAMES, "", tmp_path)
    assert not list(tmp_path.iterdir())
    assert output_of(NAMES, "remembered", tmp_path) == plain
    (index,) = (tmp_path / "mlx-lm-server" / "transformers").iterdir()
    written = index.read_text()
    index.write_text(written.replace("Qwen2Config", "Qwen2xConfig"))  # it is what is used
    assert output_of(NAMES, "remembered", tmp_path) != plain
    index.write_text("[[")  # damaged
    assert output_of(LOADING, str(llama), tmp_path)
    assert index.read_text() == written
    index.unlink()
    index.parent.rmdir()
    index.parent.write_text("not a folder")
    assert output_of(NAMES, "remembered", tmp_path) == plain


def test_the_parts_of_a_start_are_named_in_their_order() -> None:
    times = StartTimes()
    times.ended("imports")
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    times.ended("weights")
    whole, parts = str(times).split(" s of CPU time: ")
    first, second = parts.split(", ")
    assert first.startswith("imports ") and second.startswith("weights ")
    assert float(whole.split(", ")[1]) >= float(second.split()[1]) >= 0.2
