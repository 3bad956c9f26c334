from __future__ import annotations

from array import array
from typing import Any

import pytest

from shared.hashing import (
    block_hash,
    block_hashes,
    model_of,
    namespace_root,
    rank_namespace,
    salted_root,
    split_namespace,
    state_namespace,
)

ROOT = bytes(range(16))


@pytest.mark.parametrize("size", [1, 4, 16])
def test_no_salt_leads_into_the_chain_of_another_prompt(size: int) -> None:
    first = [0x41 + number for number in range(size)]  # ids whose bytes are UTF-8
    salt = array("I", first).tobytes().decode()
    second = list(range(100, 100 + size))
    (own,) = block_hashes(salted_root(ROOT, salt), second, size)
    assert own not in block_hashes(ROOT, first + second, size)
    assert salted_root(ROOT, salt) != block_hash(ROOT, first)


def test_roots_are_of_their_salts_alone() -> None:
    salts = ["", "a", "b", "a/", "a/b", "ab", "\0", "a\0"]
    roots = [salted_root(ROOT, salt) for salt in salts]
    roots += [salted_root(root, "a") for root in roots]
    roots += [state_namespace(ROOT, layout) for layout in ([], ["a"], ["a", "b"], ["ab"])]
    assert len(set(roots)) == len(roots) - 1  # without a salt the root is the same


def test_a_root_is_of_all_that_keys_and_values_depend_on() -> None:
    """The digest stays the same from release to release: their files are found."""
    plain: dict[str, Any] = {
        "fingerprint": "f",
        "adapter": "a",
        "kv_bits": 8,
        "kv_group_size": 64,
        "block_size": 16,
        "head": "h",
        "tensor_parallel": 2,
        "products": ["p"],
        "software": ["s"],
    }
    assert namespace_root(**plain).hex() == "6263632b87bed8e710bcb98608677498"
    exact = plain | {"kv_bits": 16}
    assert namespace_root(**exact) == namespace_root(**exact | {"kv_group_size": 32})
    others = {name: value * 2 for name, value in plain.items()} | {"kv_bits": 4}
    roots = [namespace_root(**plain | {name: value}) for name, value in others.items()]
    roots += [namespace_root(**plain), namespace_root(**plain | {"head": ""})]
    assert len(set(roots)) == len(plain) + 2


def test_a_rank_has_a_namespace_beside_that_of_its_model() -> None:
    digits = ROOT.hex()
    assert rank_namespace(digits, 0) == digits
    for rank in (0, 1, 12):
        assert split_namespace(rank_namespace(digits, rank)) == (digits, rank)
    states = state_namespace(ROOT, ["a"]).hex()
    assert model_of(states) == model_of(digits) == digits[:16]
