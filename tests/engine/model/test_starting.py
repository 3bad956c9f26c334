"""What makes a start shorter does not change what is loaded."""

import subprocess
import sys
import time
from collections.abc import Callable
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
assert "__file__" not in vars(sys.modules["transformers.models"])
print(type(loaded.tokenizer._tokenizer).__name__, loaded.tokenizer.encode("Hello, you"))
from transformers import AutoTokenizer, LlamaConfig

print(LlamaConfig().model_type, type(AutoTokenizer.from_pretrained(sys.argv[1])).__name__)
"""


def test_models_and_tokenizers_load_beside_the_plain_package(
    tiny_model: Callable[..., Path],
) -> None:
    path = tiny_model("llama")
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    tokenizer, here = done.stdout.splitlines()[-2:]
    assert here == f"llama {tokenizer.split()[0]}"


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
