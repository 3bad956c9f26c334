"""The process that decodes images is lost, and comes back."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from router.images.decoder import DecodeJob
from router.images.decoder_process import DecoderProcess
from router.images.metrics import ImageMetrics
from router.images.preparing import ImagePreparer
from shared.sandbox.worker_process import WorkerLost
from shared.settings import Settings
from tests.router.conftest import eventually
from tests.router.images.pictures import VISION, encoded, picture, png_header
from tests.vision_models import needs_mlx_vlm

needs_mlx_vlm()

MOST = 50_000_000
IMAGE = encoded(picture())


class QuickDecoder(DecoderProcess):
    module = "tests.router.images.quick_decoder"


@pytest.fixture(scope="module")
def process() -> Iterator[DecoderProcess]:
    process = QuickDecoder(time_limit_s=2)
    yield process
    process.close()
    assert process.pid is None


@pytest.fixture(scope="module")
def real() -> Iterator[DecoderProcess]:
    """A process with the processors of models."""
    process = DecoderProcess()
    yield process
    process.close()


@pytest.fixture
def job(vision_dir: Path) -> DecodeJob:
    return DecodeJob(folder=str(vision_dir), vision=VISION, max_pixels=MOST, is_base64=False)


def started(process: DecoderProcess, job: DecodeJob) -> int:
    """Return the id of the process, which has prepared an image."""
    process.prepare(job, IMAGE)
    assert process.pid is not None
    return process.pid


def lose(pid: int, number: signal.Signals) -> None:
    """Stop a process, and soon kill it if ``number`` is SIGKILL."""
    os.kill(pid, signal.SIGSTOP)
    if number == signal.SIGKILL:
        threading.Timer(0.2, os.kill, (pid, number)).start()


def test_an_image_is_prepared(real: DecoderProcess, job: DecodeJob) -> None:
    answer, frames = real.prepare(job, IMAGE)
    assert answer.reason is None and len(answer.digest) == 32
    assert [spec.nbytes for spec in answer.specs] == [len(frame) for frame in frames]


def test_a_folder_of_the_same_name_in_the_working_directory_is_not_imported(
    job: DecodeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("router", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    with closing(QuickDecoder()) as process:
        assert started(process, job)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_process_fails_its_image_alone(
    process: DecoderProcess, job: DecodeJob, number: signal.Signals
) -> None:
    lose(started(process, job), number)
    with pytest.raises(WorkerLost) as lost:
        process.prepare(job, IMAGE)
    assert lost.value.is_late == (number == signal.SIGSTOP) and process.pid is None
    assert process.prepare(job, IMAGE).answer.reason is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_image_is_not_blamed_for_one_lost_process(
    process: DecoderProcess, job: DecodeJob, number: signal.Signals
) -> None:
    preparer = ImagePreparer(Settings(), ImageMetrics(CollectorRegistry()))
    lose(pid := started(process, job), number)
    assert preparer._answer(process, job, IMAGE).answer.reason is None
    assert process.pid != pid
    preparer.close()


def test_a_process_that_died_has_the_time_of_a_start_again(
    process: DecoderProcess, job: DecodeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(started(process, job), signal.SIGKILL)
    eventually(lambda: process.pid is None)
    monkeypatch.setattr(process, "_time_limit_s", 0)
    assert process.prepare(job, IMAGE).answer.reason is None


def test_an_answer_that_was_read_in_part_is_not_taken_for_the_next(
    process: DecoderProcess, job: DecodeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = process.prepare(job, IMAGE).answer.digest

    def no_memory(length: int) -> memoryview:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr("shared.sandbox.worker_process._buffer", no_memory)
        with pytest.raises(OSError, match="allocate"):
            process.prepare(job, IMAGE)
    assert process.pid is None
    assert process.prepare(job, IMAGE).answer.digest == expected


def test_an_image_of_too_much_memory_is_refused(real: DecoderProcess, job: DecodeJob) -> None:
    allowed = msgspec.structs.replace(job, max_pixels=2**40)
    answer, _ = real.prepare(allowed, png_header(60_000, 60_000))
    if sys.platform == "linux":
        assert answer.reason == "memory"
    else:  # which refuses no allocation: this image is short, and is found to be damaged first
        assert answer.reason in ("memory", "damaged")
    assert real.prepare(job, IMAGE).answer.reason is None


def test_a_model_without_a_processor_is_an_error(
    real: DecoderProcess, job: DecodeJob, tmp_path: Path
) -> None:
    answer, _ = real.prepare(msgspec.structs.replace(job, folder=str(tmp_path)), IMAGE)
    assert answer.is_fault_of_server and answer.text


def test_a_process_does_not_keep_the_processors_of_all_models_that_ever_were(
    process: DecoderProcess, job: DecodeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.images.decoder_process.MAX_PROCESSORS", 1)
    pid = started(process, job)
    assert started(process, job) == pid
    assert started(process, msgspec.structs.replace(job, folder="another")) != pid
