from __future__ import annotations

from array import array

import pytest

from shared.hashing import block_hash, block_hashes, salted_root, state_namespace

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
