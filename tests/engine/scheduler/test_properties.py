"""Random messages in any order: every plan is legal, every text is right, and it ends."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.plan import StoreRoom
from engine.speculation.speculator import Speculator
from shared import wire
from tests.engine.conftest import Wrap
from tests.engine.guesses import guessing
from tests.engine.marked_pictures import IMAGE, LENGTHS, Shown, flattened, items_of
from tests.engine.scheduler.fake_executor import SALTS, expected
from tests.engine.scheduler.harness import (
    BLOCK_BYTES,
    RECURRENT,
    SHARED,
    Client,
    Engine,
    config,
    request,
)

CONFIGS = st.fixed_dictionaries(
    {
        "blocks": st.sampled_from([9, 16, 33, 64, 300]),
        "block_size": st.sampled_from([1, 4, 16]),
        "blocks_per_page": st.sampled_from([1, 2, 4]),
        "gather_token_bytes": st.sampled_from([0, BLOCK_BYTES // 8]),
        "gather_rows": st.sampled_from([1, 2, 99]),
        "pads_gathers": st.booleans(),
        "unpacked_token_bytes": st.sampled_from([0, BLOCK_BYTES // 2]),
        "context_length": st.sampled_from([30, 101, 400]),
        "max_batch_size": st.integers(1, 5),
        "prefill_batch_size": st.integers(1, 4),
        "completion_batch_size": st.integers(1, 9),
        "prefill_chunk_tokens": st.sampled_from([None, 1, 7, 16, 64]),
        "prefix_cache": st.sampled_from([True, True, True, False]),
        "store_enabled": st.booleans(),
        "store_policy": st.sampled_from(["evict_only", "write_through"]),
        "max_insert_bytes": st.sampled_from([1, 2 * BLOCK_BYTES, 2**26]),
        "look_ahead": st.booleans(),
        "layers": st.sampled_from([1, 2, 5, 30]),
        "pass_token_bytes": st.sampled_from([0, 30]),
        "streams_share": st.sampled_from([0.05, 0.5, 0.95]),
        "batches_chunks": st.booleans(),
        "decodes_ends": st.booleans(),
        "max_sequences": st.sampled_from([3, 100]),
        "reserved_tokens": st.sampled_from([0, 8, 512]),
    }
)
BUDGETS = [
    wire.ThinkingBudget(tokens=tokens, start_ids=start, end_ids=end, is_open=is_open)
    for tokens in (0, 1, 5)
    for start, end, is_open in (([], [7], True), ([4], [7, 8], False), ([4, 5], [8, 8, 9], True))
]
STATES = st.sampled_from(
    [
        {},
        {},
        *(fields | {"max_snapshots": n} for fields in RECURRENT.values() for n in (0, 1, 3, 30)),
    ]
)


class Chaos:
    """Random messages at random moments, all made from one seed."""

    def __init__(self, engine: Engine, seed: int, failures: bool) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.failures = failures
        self.failed = 0
        self.aborted: set[tuple[str, int]] = set()
        self.prefixes = [self._items(self.random.randrange(1, 60)) for _ in range(3)]
        self.number = 0

    def act(self) -> None:
        action = self.random.choices(
            [*"submit turn schedule apply abort store room lose again fail raise drop".split()],
            [20, 30, 20, 20, 4, 10, 2, 2, 2, *((3, 1) if self.failures else (0, 0)), 0.2],
        )[0]
        getattr(self, f"_{action}")()

    def _submit(self) -> None:
        self.number += 1
        self.engine.submit(self._request(f"r{self.number}", 1))

    def _request(self, name: str, attempt: int) -> wire.Submit:
        pick = self.random
        prompt = self._items(pick.randrange(0, 20))
        if pick.random() < 0.7:
            prefix = pick.choice(self.prefixes)
            prompt = prefix[: pick.randrange(len(prefix) + 1)] + prompt
        earlier = [client for client in self.engine.clients.values() if client.tokens]
        if earlier and pick.random() < 0.3:
            turn = pick.choice(earlier)
            whole = [*items_of(turn.request), *turn.request.generated, *turn.tokens]
            prompt = whole[: len(whole) - pick.choice([0, 0, 0, 1, 9])] + prompt
        tokens, images = flattened(prompt)
        message = request(
            name,
            tokens,
            images=images,
            attempt=attempt,
            sampling=wire.SamplingParams(
                seed=pick.randrange(3), presence_penalty=pick.choice([0.0, 0.0, 0.5])
            ),
            prompt_logprobs=pick.choice([None, None, None, 0, 2]),
            max_tokens=pick.choice([0, 1, 2, 7, 30, 90]),
            min_tokens=pick.choice([0, 0, 5]),
            stop_token_ids=pick.choice([[], [3], [3, 4]]),
            cache_salt=pick.choice(SALTS),
            thinking=pick.choice([None, *BUDGETS]),
            priority=pick.choice([0, 0, 0, 1, -1, wire.BACKGROUND_PRIORITY]),
        )
        if tokens and len(tokens) < self.engine.longest and pick.random() < 0.2:
            outputs = expected(message, self.engine.longest)[0]
            fields = {name: getattr(message, name) for name in message.__struct_fields__}
            message = wire.Submit(
                **(fields | {"generated": outputs[: pick.randrange(len(outputs) + 1)]})
            )
        return message

    def _items(self, count: int) -> list[int | Shown]:
        takes_pictures = self.engine.config.image_token_id is not None
        return [
            Shown(self.random.randrange(len(LENGTHS)))
            if takes_pictures and self.random.random() < 0.15
            else self.random.randrange(20)
            for _ in range(count)
        ]

    def _turn(self) -> None:
        self.engine.turn()

    def _schedule(self) -> None:
        self.engine.schedule()

    def _apply(self) -> None:
        if self.engine.results:
            self.engine.apply()

    def _abort(self) -> None:
        if self.engine.clients:
            name, attempt = self.random.choice(list(self.engine.clients))
            self._note_ended(name, attempt)
            self.engine.scheduler.abort(name, self.random.choice([None, attempt]))
            self.engine.check()

    def _again(self) -> None:
        """Submit a newer attempt of an earlier request."""
        if self.engine.clients:
            name, _ = self.random.choice(list(self.engine.clients))
            newest = max(number for other, number in self.engine.clients if other == name)
            self._note_ended(name, newest)
            self.engine.submit(self._request(name, newest + 1))

    def _drop(self) -> None:
        """Drop the requests of one of two routers."""
        dropped = {key for key in self.engine.clients if self.random.random() < 0.5}
        for name, attempt in dropped:
            self._note_ended(name, attempt)
        self.engine.scheduler.drop(dropped)
        self.engine.check()

    def _note_ended(self, name: str, attempt: int) -> None:
        """Note that ``name``, unless it has ended, may end without its whole text."""
        for key, client in self.engine.clients.items():
            if key[0] == name and client.end is None:
                self.aborted.add(key)

    def _store(self) -> None:
        if self.engine.fetches:
            self.engine.answer_store()

    def _room(self) -> None:
        """Let the kvstore have more room or less."""
        files = self.random.choice([0, 1, 3, 300])
        self.engine.store_room = StoreRoom(files, files * BLOCK_BYTES)

    def _lose(self) -> None:
        """Let the kvstore not have got a block, or a state."""
        kept = self.random.choice([self.engine.stored, self.engine.stored_states])
        if kept:
            lost = self.random.choice(list(kept))
            del kept[lost]
            is_state = kept is self.engine.stored_states
            self.engine.scheduler.on_not_stored(lost, is_snapshot=is_state)

    def _fail(self) -> None:
        takes_pictures = self.engine.config.image_token_id is not None
        if takes_pictures and self.random.random() < 0.5:
            self.engine.executor.fail_next_picture = True
        else:
            self.engine.executor.fail_next_chunk = True

    def _raise(self) -> None:
        if self.random.random() < 0.5:
            self.engine.fail_next_plan = True
        else:
            self.engine.executor.fail_next_step = True

    def judge(self, client: Client) -> None:
        key = (client.request.request_id, client.request.attempt)
        assert client.answer is not None
        if isinstance(client.answer, wire.Refused):
            assert client.end is None
        elif client.end is not None and client.end.finish == "error":
            assert self.failures and client.end.error
        elif key in self.aborted:
            whole = expected(client.request, self.engine.longest)[0]
            got = [*client.request.generated, *client.tokens]
            assert got == whole[: len(got)]
        elif self.engine.recoveries and client.end is not None and client.end.finish == "length":
            whole = expected(client.request, self.engine.longest)[0]
            got = [*client.request.generated, *client.tokens]
            assert got == whole[: len(got)], "memory may hold less since it ran out"
        else:
            self.engine.assert_right(client)


def speculator(wrong: float, tokens: int, by_executor: bool) -> Speculator:
    return guessing(
        lambda message: [*message.token_ids, *expected(message, 400)[0]],
        wrong,
        tokens,
        executor="executor" if by_executor else "",
    )


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    changes=CONFIGS,
    states=STATES,
    seed=st.integers(0, 2**32),
    failures=st.booleans(),
    drafts=st.sampled_from([None, None, (0.0, 1), (0.3, 5), (0.3, 16), (1.0, 3)]),
    guesses=st.sampled_from([None, None, 0.0, 0.3, 1.0]),
)
def test_any_order_of_messages_gives_legal_plans_and_right_texts(
    changes: dict[str, Any],
    states: dict[str, Any],
    seed: int,
    failures: bool,
    drafts: tuple[float, int] | None,
    guesses: float | None,
) -> None:
    reserved_tokens = changes.pop("reserved_tokens")
    for name in ("gather_token_bytes", "unpacked_token_bytes"):
        changes[name] //= changes["block_size"]
    if states:  # three of them take more than 7 blocks
        changes["blocks"] = max(changes["blocks"], 16)
    if states or changes["look_ahead"]:
        changes["decodes_ends"] = False
    if not states.get("keeps_kv", True):
        changes["gather_token_bytes"] = changes["unpacked_token_bytes"] = 0
    engine = Engine(
        config(**changes, **states),
        None if drafts is None else speculator(*drafts, guesses is not None),
    )
    engine.executor.wrong_guesses = guesses
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.scheduler.memory.RESERVED_TOKENS", reserved_tokens)
        run_chaos(engine, Chaos(engine, seed, failures))


def test_a_sequence_waits_for_guesses_though_the_step_before_them_made_none(wrap: Wrap) -> None:
    engine = Engine(config(look_ahead=True, decodes_ends=False), speculator(0.0, 3, True))
    engine.executor.wrong_guesses = 0.0
    numbers = itertools.count()

    @wrap(engine.scheduler.planner._drafting, "guesses_after")
    def sometimes(guesses_after: Callable[..., int], *of: Any) -> int:
        return guesses_after(*of) if next(numbers) % 3 else 0

    engine.serve(request("a", SHARED[:20], max_tokens=100))
    ahead = 0
    for before, plan in itertools.pairwise(engine.plans):
        for decode in plan.decodes:
            if decode.token_id is None:  # the one before is in flight
                ahead += 1
                assert not any(each.guesses for each in before.decodes)
    assert ahead and engine.executor.accepted > 20


@pytest.mark.parametrize("seed", [23, 68, 126, 172, 195, 238, 267, 306, *range(1000, 1008)])
def test_divided_passes_under_pressure(seed: int) -> None:
    """What is cut off in the middle of a pass: aborts, preemptions and chunks that raise."""
    pick = random.Random(seed)
    changes = {
        "blocks": pick.choice([9, 16, 33]),
        "blocks_per_page": pick.choice([1, 2, 4]),
        "block_size": 4,
        "context_length": pick.choice([101, 400]),
        "max_batch_size": 3,
        "prefill_batch_size": pick.randrange(1, 4),
        "completion_batch_size": pick.randrange(2, 6),
        "prefill_chunk_tokens": pick.choice([7, 16]),
        "look_ahead": pick.random() < 0.5,
        "layers": pick.choice([5, 30]),
        "streams_share": pick.choice([0.5, 0.95]),
    }
    engine = Engine(config(**changes))
    run_chaos(engine, Chaos(engine, seed, failures=pick.random() < 0.5))


@pytest.mark.parametrize("seed", range(20))
def test_pictures_are_at_their_places_and_in_their_blocks(seed: int) -> None:
    """Whatever becomes of requests: embeddings of another picture would give another text."""
    pick = random.Random(seed)
    engine = Engine(
        config(
            blocks=pick.choice([16, 33, 200]),
            block_size=pick.choice([1, 4, 16]),
            context_length=pick.choice([101, 400]),
            max_batch_size=3,
            completion_batch_size=pick.randrange(1, 6),
            prefill_chunk_tokens=pick.choice([None, 7, 16]),
            look_ahead=pick.random() < 0.5,
            layers=pick.choice([1, 5, 30]),
            store_enabled=pick.random() < 0.5,
            image_token_id=IMAGE,
            picture_token_bytes=10,
            picture_bytes=10 * pick.choice([52, 60, 200]),
            picture_layers=pick.choice([1, 3, 20]),
            whole_picture_tokens=pick.choice([0, 0, 16]),
        )
    )
    run_chaos(engine, Chaos(engine, seed, failures=pick.random() < 0.5))
    pictures = engine.scheduler.planner.pictures
    assert set(engine.executor.encoded) == set(pictures._entries)


def run_chaos(engine: Engine, chaos: Chaos) -> None:
    """Let ``chaos`` act, then let everything end, and check all of it."""
    for _ in range(120):
        chaos.act()
    engine.store_room = None
    engine.run()
    assert not engine.scheduler.num_unstored
    for client in engine.clients.values():
        chaos.judge(client)
    engine.assert_nothing_left()
