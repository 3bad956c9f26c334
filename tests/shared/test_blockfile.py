from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from shared.blockfile import BlockFileError, decode, encode

HASH = bytes(range(16))
NAMESPACE = "ab" * 16
PAYLOAD = (b"keys" * 300, memoryview(b"values!" * 100), b"")


@settings(deadline=None, derandomize=True)
@given(st.lists(st.binary(max_size=300), max_size=6))
def test_decoding_gives_back_the_buffers(payload: list[bytes]) -> None:
    assert [bytes(view) for view in decode(encode(HASH, NAMESPACE, payload), HASH, NAMESPACE)] == (
        payload
    )


def test_the_views_share_the_memory_of_the_file() -> None:
    data = encode(HASH, NAMESPACE, PAYLOAD)
    assert all(view.obj is data for view in decode(data, HASH, NAMESPACE))


def test_a_safetensors_library_can_open_it(tmp_path: Path) -> None:
    path = tmp_path / "block.safetensors"
    path.write_bytes(encode(HASH, NAMESPACE, PAYLOAD))
    with safe_open(path, framework="numpy") as file:
        assert file.metadata()["hash"] == HASH.hex()
        assert file.metadata()["namespace"] == NAMESPACE
        for number, buffer in enumerate(PAYLOAD):
            assert file.get_tensor(str(number)).tobytes() == bytes(buffer)


def assert_refused(data: bytes, hash: bytes = HASH, namespace: str = NAMESPACE) -> None:
    with pytest.raises(BlockFileError):
        decode(data, hash, namespace)


def test_another_blocks_file_is_refused() -> None:
    data = encode(HASH, NAMESPACE, PAYLOAD)
    assert_refused(data, HASH[::-1])
    assert_refused(data, namespace="cd" * 16)


def test_a_cut_file_is_refused_wherever_it_was_cut() -> None:
    data = encode(HASH, NAMESPACE, (b"keys", b"values"))
    for length in range(len(data)):
        assert_refused(data[:length])
    assert_refused(data + b"x")


def test_a_flipped_bit_is_refused_or_changes_nothing() -> None:
    """Padding and the spelling of the header may change without changing the block."""
    payload = (b"keys", b"values")
    data = bytearray(encode(HASH, NAMESPACE, payload))
    for position in range(len(data) * 8):
        data[position // 8] ^= 1 << position % 8
        try:
            assert tuple(map(bytes, decode(bytes(data), HASH, NAMESPACE))) == payload
        except BlockFileError:
            pass
        data[position // 8] ^= 1 << position % 8
    data[-1] ^= 1
    assert_refused(bytes(data))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=200), st.booleans())
def test_rubbish_is_refused(rubbish: bytes, with_length: bool) -> None:
    assert_refused(len(rubbish).to_bytes(8, "little") + rubbish if with_length else rubbish)


@pytest.mark.parametrize(
    "header",
    [b"[" * 50_000, b"{}", b'{"__metadata__": 1}', b'{"__metadata__":{}, "1": {}}', b"null"],
)
def test_a_malformed_header_is_refused(header: bytes) -> None:
    assert_refused(len(header).to_bytes(8, "little") + header)


def test_swapping_the_sizes_of_two_buffers_is_refused() -> None:
    data = encode(HASH, NAMESPACE, (b"a" * 2, b"a" * 1))
    swapped = data.replace(b'[2],"data_offsets":[0,2]', b'[1],"data_offsets":[0,1]').replace(
        b'[1],"data_offsets":[2,3]', b'[2],"data_offsets":[1,3]'
    )
    assert swapped != data and len(swapped) == len(data)
    assert_refused(swapped)
