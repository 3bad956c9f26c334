"""Batches in `tests.e2e.chaos`: each line has its answer once, and the right one, or has lost two
engines."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Coroutine, Sequence
from typing import Any

import httpx

from tests.e2e.awake import awake_s
from tests.e2e.chaos.load import Judge
from tests.e2e.chaos.questions import COMPLETIONS, Question, Reply
from tests.e2e.chaos.site import KEYS, Site

LINES = 16
ENDS_WITHIN_S = 400.0
ANSWERED_WITHIN_S = 240.0
"""Of a request to create or read something, tried again while the router is away."""
ENDED = ("completed", "failed", "expired", "cancelled")


class BatchError(Exception):
    """A request about a batch was not answered, or with an error."""


class Batches:
    """A client that has one batch after the other."""

    def __init__(
        self, site: Site, judge: Judge, answers: Sequence[tuple[Question, Reply]], seed: int
    ) -> None:
        self._judge = judge
        self._answers = [each for each in answers if each[0].path == COMPLETIONS]
        self._chance = random.Random(f"{seed} batches")
        self._client = httpx.AsyncClient(
            base_url=site.url, timeout=60, headers={"authorization": f"Bearer sk-{KEYS[0]}"}
        )
        self.is_over = False

    async def run(self, pause_s: float) -> None:
        while not self.is_over:
            await self._judged(self._one())
            await asyncio.sleep(pause_s)
        await self._judged(self._wait_for_all())
        await self._client.aclose()

    async def _judged(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except BatchError as error:
            self._judge.find(str(error))

    async def _one(self) -> None:
        """Raises: `BatchError`."""
        asked = {str(number): self._chance.choice(self._answers) for number in range(LINES)}
        lines = (
            {"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": question.body}
            for name, (question, _) in asked.items()
        )
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = await self._send(
            "POST", "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}
        )
        created = {"endpoint": COMPLETIONS, "completion_window": "1h"}
        batch = await self._send(
            "POST", "/v1/batches", json=created | {"input_file_id": file["id"]}
        )
        deadline = awake_s() + ENDS_WITHIN_S
        while batch["status"] not in ENDED:
            if awake_s() > deadline:
                self._judge.find(f"a batch does not end: {batch}")
                return
            await asyncio.sleep(1)
            batch = await self._send("GET", f"/v1/batches/{batch['id']}")
        found = [line for name in ("output", "error") for line in await self._lines(batch, name)]
        names = sorted((line["custom_id"] for line in found), key=int)  # errors are a file apart
        if batch["status"] != "completed" or names != list(asked):
            self._judge.find(f"{batch} has {found}")
        for line in found:
            question, expected = asked[line["custom_id"]]
            reply = Reply()
            response = line["response"] or {}
            status = response.get("status_code")
            if status == 503 and response["body"]["error"]["code"] == "engine_lost":
                self._judge.kinds["line that lost two engines"] += 1
                continue
            if status != 200:
                self._judge.find(f"{question} in a batch: {line}")
                continue
            reply.add(response["body"])
            self._judge.kinds["line of a batch"] += 1
            self._judge.right(question, reply, expected)

    async def _wait_for_all(self) -> None:
        """Wait for all batches that the server has. There are more than those of `_one`: a batch is
        created twice if its first answer was lost. Raises: `BatchError`."""
        deadline = awake_s() + ENDS_WITHIN_S
        while left := [each for each in await self._all() if each["status"] not in ENDED]:
            if awake_s() > deadline:
                raise BatchError(f"batches do not end: {left}")
            await asyncio.sleep(1)
        for batch in await self._all():
            if batch["status"] != "completed":
                self._judge.find(f"a batch is not completed: {batch}")

    async def _all(self) -> list[dict[str, Any]]:
        """Raises: `BatchError`."""
        found: list[dict[str, Any]] = []
        page = await self._send("GET", "/v1/batches?limit=100")
        found += page["data"]
        while page["has_more"]:
            page = await self._send("GET", f"/v1/batches?limit=100&after={page['last_id']}")
            found += page["data"]
        return found

    async def _lines(self, batch: dict[str, Any], name: str) -> list[dict[str, Any]]:
        file = batch[f"{name}_file_id"]
        if file is None:
            return []
        content = await self._send("GET", f"/v1/files/{file}/content", is_text=True)
        return [json.loads(line) for line in content.splitlines()]

    async def _send(self, method: str, path: str, *, is_text: bool = False, **fields: Any) -> Any:
        """Return the answer. Try again while the router is away or has no room.

        Raises: `BatchError`."""
        deadline = awake_s() + ANSWERED_WITHIN_S
        last = ""
        while awake_s() < deadline:
            try:
                answer = await self._client.request(method, path, **fields)
            except httpx.HTTPError as error:
                last = repr(error)
                await asyncio.sleep(1)
                continue
            if answer.is_success:
                return answer.text if is_text else answer.json()
            last = f"{answer.status_code} {answer.text}"
            if answer.status_code not in (429, 503):
                raise BatchError(f"{method} {path}: {last}")
            await asyncio.sleep(1)
        raise BatchError(f"{method} {path}: not done within {ANSWERED_WITHIN_S:g} s: {last}")
