"""Pictures with the default flags."""

from __future__ import annotations

import os

import pytest
from PIL import Image

from tests.router.conftest import Server, StartServer, ok
from tests.router.images.conftest import Ask
from tests.router.images.pictures import data_url, encoded
from tests.router.scripted_engine import ScriptedEngine


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> Server:
    return start_server()


def test_a_photo_of_3_mb_needs_no_flag(seeing: ScriptedEngine, ask: Ask) -> None:
    photo = encoded(Image.frombytes("RGB", (1024, 1024), os.urandom(3 * 1024 * 1024)))
    assert len(photo) > 3_000_000
    ok(ask(data_url(photo)))
