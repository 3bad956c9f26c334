"""No share takes all of a capacity."""

from __future__ import annotations

import pytest

from router.fair_shares import FairShares


def fill(shares: FairShares, share: str, limit: int, *, alone: bool = False) -> int:
    """Take as much as possible, one at a time."""
    while shares.has_room(share, limit, alone=alone):
        shares.take(share)
    return shares.of(share)


@pytest.mark.parametrize(("limit", "most"), [(0, 0), (1, 1), (2, 1), (7, 4), (8, 4)])
def test_a_share_takes_one_more_while_it_has_fewer_than_are_free(limit: int, most: int) -> None:
    shares = FairShares()
    assert fill(shares, "a", limit) == most
    assert fill(shares, "b", limit) == -(-(limit - most) // 2)


def test_a_share_that_is_alone_takes_all() -> None:
    shares = FairShares()
    assert fill(shares, "a", 7, alone=True) == shares.total == 7


@pytest.mark.parametrize("limit", range(12))
def test_many_at_once_have_the_room_that_they_have_one_after_the_other(limit: int) -> None:
    shares = FairShares()
    shares.take("other", limit // 4)
    one_by_one = FairShares()
    one_by_one.take("other", limit // 4)
    most = fill(one_by_one, "a", limit)
    assert shares.has_room("a", limit, most) and not shares.has_room("a", limit, most + 1)


def test_what_is_given_back_is_free() -> None:
    shares = FairShares()
    shares.take("a", 3)
    assert not shares.has_room("b", 4, 2)
    shares.give_back("a", 3)
    assert shares.has_room("b", 4, 2) and shares.of("a") == shares.total == 0
