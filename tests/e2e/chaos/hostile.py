"""Hostile clients, beside those of `tests.e2e.chaos`."""

from __future__ import annotations

import http.client
import random
import time
from collections import Counter
from urllib.parse import urlsplit

from tests.e2e.abuse.attack import Attack
from tests.e2e.abuse.attacks import abuses
from tests.e2e.chaos.load import Judge
from tests.e2e.chaos.site import HOSTILE, Site
from tests.e2e.fuzz.framing import FramingError


class Hostile:
    """Does one attack after the other, on either router."""

    def __init__(self, site: Site, judge: Judge, seed: int) -> None:
        self._judge = judge
        self._ports = [
            urlsplit(endpoint.url).port or 0
            for endpoint in (site.first_endpoint, site.second_endpoint)
        ]
        self._chance = random.Random(f"{seed} hostile")
        self.outcomes: Counter[str] = Counter()
        self.is_over = False

    def run(self, pause_s: float) -> None:
        names = list(abuses())
        while not self.is_over:
            name = self._chance.choice(names)
            try:
                found = abuses()[name](Attack(self._chance.choice(self._ports), f"sk-{HOSTILE}"))
            except FramingError as error:
                found = "wrong"
                self._judge.find(f"{name}: {error}")
            except (OSError, http.client.HTTPException) as error:
                found = type(error).__name__
            self.outcomes[found] += 1
            if found == "500":
                self._judge.find(f"{name}: an internal error")
            time.sleep(self._chance.uniform(0, 2 * pause_s))
