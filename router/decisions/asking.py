"""Asks a model the questions of one request: many prompts with one beginning, each of which is
computed up to its end, where the log-probabilities of its labels are the answer.

The prompts are sequences for engines like any others: they share the pages of their beginning, are
batched with the streams of others, and continue on another engine if theirs is lost. A few are in
engines at a time, which leaves room for other requests.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from router.decisions.questions import DecisionTask, TypedAnswer, TypedQuestion
from router.decisions.readout import calibrated, mean
from router.decisions.wording import INSTRUCTIONS, binary_text, label_text, listed_text
from router.errors import (
    ContextLengthExceeded,
    EndpointNotSupported,
    InvalidRequest,
    Unavailable,
)
from router.fleet.engines.engine import Model
from router.fleet.queue.placement import prompt_blocks
from router.fleet.router import Router
from router.fleet.sequences.remote_sequence import RemoteSequence
from router.fleet.tenants.tenant import Tenant
from router.generation.sampling import (
    check_prompt_length,
    image_frames,
    salt_of,
    submit_message,
)
from router.generation.signal import Signal
from router.schemas.conversation import PARAGRAPH_BREAK, ChatMessage, ContentPart
from router.schemas.requests import ChatRequest
from router.tokens.image_prompts import Prompt
from router.tokens.labels import Label, Labels
from shared.wire import Submit

MAX_PROMPTS = 1024
"""Of one request: a prompt for each question, times its rotations, times the groups of its options.
"""
MAX_ENDING_CHARS = 4_000_000
"""Of all prompts of a request, without their common beginning. A body's options are repeated in
each rotation."""
WORDING_CHARS = 200
"""About the length of the text around a question."""
PROMPTS_AT_ONCE = 16
"""Prompts of a request that are in engines or wait for one. Each holds a slot for a few steps."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class _Ballot:
    """A prompt that asks for one of several labels."""

    question: TypedQuestion
    options: Sequence[int]
    """The numbers of the options that it asks about, in the order of ``labels``."""
    labels: Sequence[Label]
    ending: list[int]
    """Its tokens after the common beginning."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """The result of a request."""

    answers: list[TypedAnswer]
    input_tokens: int
    """Of the common beginning, once, and of what each prompt has after it."""
    cached_tokens: int
    """Of the common beginning that earlier requests had computed."""


class DecisionRun:
    """One request to ``model``: call `prepare`, then `decide`."""

    def __init__(
        self,
        router: Router,
        model: Model,
        tenant: Tenant,
        task: DecisionTask,
        *,
        request_id: str,
        temperature: float,
        rotations: int,
        priority: int | None = None,
        cache_salt: str | None = None,
        traceparent: str = "",
    ) -> None:
        self._router, self._model, self._tenant = router, model, tenant
        self._task, self._temperature, self._rotations = task, temperature, rotations
        self._request_id, self._traceparent = request_id, traceparent
        self._request = ChatRequest(
            messages=[],
            temperature=0.0,
            max_tokens=1,
            logprobs=True,
            priority=priority,
            cache_salt=cache_salt,
        )
        self.cache_salt = salt_of(self._request, model.settings, tenant)
        self._places = asyncio.Semaphore(PROMPTS_AT_ONCE)
        self._version = model.replicas
        self._num_submitted = 0
        self._cached_tokens: list[int] = []

    # -- on a thread -----------------------------------------------------------

    def prepare(self, messages: Sequence[ChatMessage]) -> None:
        """Make the tokens of all prompts of the first round. ``messages`` are those of the task,
        with images prepared. Raises `InvalidRequest` and `EndpointNotSupported`."""
        mark = secrets.token_hex(16)
        check_length = partial(check_prompt_length, self._model)
        renderer = self._model.renderer
        try:
            self._beginning, self._ending = renderer.render_around(
                mark,
                self._with_mark(messages, mark),
                {"enable_thinking": False},
                check_length=check_length,
            )
        except ContextLengthExceeded as error:
            error.param = self._task.context_field
            raise
        self._labels: Labels = renderer.labels(self._ending)
        if len(self._labels.letters) < 2:
            raise EndpointNotSupported(
                "This model cannot answer typed questions: no two letters are one token each where "
                "its answers begin."
            )
        self._check_size()
        self._ballots = [
            [[self._ballot(question, group) for group in first] for first in rounds]
            for question, rounds in (
                (asked, [self._groups(asked, order) for order in self._orders(asked)])
                for whole in self._task.questions
                for asked in _parts(whole)
            )
        ]
        engines = list(self._model.replicas.engines)
        self._blocks = prompt_blocks(
            engines,
            self._beginning.token_ids,
            self.cache_salt,
            self._beginning.pictures,
            self._model.adapter_digest,
        )

    def _with_mark(self, messages: Sequence[ChatMessage], mark: str) -> list[ChatMessage]:
        """Return the conversation with ``mark`` in place of the question."""
        system = ChatMessage("system", INSTRUCTIONS)
        if self._task.is_conversation or not messages:
            return [system, *messages, ChatMessage("user", mark)]
        *before, last = messages
        content = last.content or ""
        if isinstance(content, str):
            text = content + PARAGRAPH_BREAK if content else ""
            return [system, *before, replace(last, content=text + mark)]
        asked = ContentPart("text", PARAGRAPH_BREAK + mark)
        return [system, *before, replace(last, content=[*content, asked])]

    def _check_size(self) -> None:
        """Raise `InvalidRequest` if the request needs too many prompts, or too long ones: before
        any of them is written."""
        num_prompts = num_chars = 0
        for question in self._task.questions:
            count = len(question.options)
            listed = sum(len(each.text) + len(each.description) for each in question.options)
            if question.kind == "multi":
                orders, prompts = min(self._rotations, 2), count
            else:
                orders = len(self._orders(question))
                prompts = len(self._groups(question, range(count)))
                prompts += prompts > 1  # the last round
            num_prompts += orders * prompts
            num_chars += orders * (prompts * (len(question.text) + WORDING_CHARS) + 2 * listed)
        if num_prompts > MAX_PROMPTS:
            raise InvalidRequest(
                f"These questions need {num_prompts} prompts; the limit is {MAX_PROMPTS}. Send "
                "fewer questions, options or samples.",
                param="questions",
                code="request_too_large",
            )
        if num_chars > MAX_ENDING_CHARS:
            raise InvalidRequest(
                f"The questions have {num_chars} characters, repeated for every sample; the limit "
                f"is {MAX_ENDING_CHARS}.",
                param="questions",
                code="request_too_large",
            )

    def _orders(self, question: TypedQuestion) -> list[list[int]]:
        """Return the orders in which the options of ``question`` are asked: rotations that put
        every option in as many places as possible."""
        count = len(question.options)
        starts = dict.fromkeys(n * count // self._rotations for n in range(self._rotations))
        return [[*range(start, count), *range(start)] for start in starts]

    def _groups(self, question: TypedQuestion, order: Sequence[int]) -> list[list[int]]:
        """Divide ``order`` into groups of about the same size, of which each has enough labels."""
        count = len(order)
        num_groups = -(-count // len(self._labels_of(question, count)))
        return [
            list(order[n * count // num_groups : (n + 1) * count // num_groups])
            for n in range(num_groups)
        ]

    def _labels_of(self, question: TypedQuestion, count: int) -> Sequence[Label]:
        """Return the labels for ``count`` options of ``question``."""
        labels = self._labels
        if question.kind == "binary":
            return labels.yes_no or labels.letters[:2]
        is_whole_scale = question.kind == "score" and count == len(question.options)
        return labels.for_levels(count) if is_whole_scale else labels.letters

    def _ballot(self, question: TypedQuestion, options: Sequence[int]) -> _Ballot:
        labels = self._labels_of(question, len(options))
        if question.kind == "binary":  # in both orders, a label means the same
            options, order = range(2), options
            text = binary_text(question, [label.text for label in labels], order)
        else:
            if question.kind == "score" and len(options) == len(question.options):
                labels = [labels[level] for level in options]  # a digit is that of its level
            labels = labels[: len(options)]
            text = listed_text(question, [label.text for label in labels], options)
        ending = self._model.renderer.encode_ending(text, self._ending)
        try:
            check_prompt_length(self._model, len(self._beginning.token_ids) + len(ending))
        except ContextLengthExceeded as error:
            error.param = question.path
            raise
        return _Ballot(question=question, options=options, labels=labels, ending=ending)

    # -- on the event loop -----------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompts of the first round, their common beginning once."""
        endings = (len(b.ending) for each in self._ballots for first in each for b in first)
        return len(self._beginning.token_ids) + sum(endings)

    async def decide(self) -> Decided:
        """Return the answers to all questions. Raises `ApiError`; no prompt runs on after that, nor
        if this is cancelled."""
        self._input_tokens = len(self._beginning.token_ids)
        asked = await _all([self._distribution(each) for each in self._ballots])
        answers, given = [], iter(asked)
        for question in self._task.questions:
            parts = [next(given) for _ in _parts(question)]
            if question.kind == "multi":
                probabilities = [part.probabilities[0] for part in parts]
                mass = sum(part.label_mass for part in parts) / len(parts)
                answers.append(TypedAnswer(probabilities, mass))
            else:
                answers += parts
        cached = min(self._cached_tokens, default=0)
        return Decided(
            answers=answers,
            input_tokens=self._input_tokens,
            cached_tokens=min(cached, len(self._beginning.token_ids)),
        )

    async def _distribution(self, rotations: Sequence[Sequence[_Ballot]]) -> TypedAnswer:
        """Return the answer to a question: the average over ``rotations``, of which each is a
        tournament that begins with the ballots of its groups."""
        masses: list[float] = []
        found = await _all([self._tournament(first, masses) for first in rotations])
        count = len(rotations[0][0].question.options)
        return TypedAnswer(
            mean([[each[option] for option in range(count)] for each in found]),
            sum(masses) / len(masses),
        )

    async def _tournament(
        self, ballots: Sequence[_Ballot], masses: list[float]
    ) -> dict[int, float]:
        """Return the probability of each option of ``ballots``: that within its group, times that
        of the group's winner among all winners."""
        found = await _all([self._probabilities(each, masses) for each in ballots])
        if len(found) == 1:
            return found[0]
        winners = [max(group, key=group.__getitem__) for group in found]
        question = ballots[0].question
        size = sum(len(question.options[number].text) for number in winners)
        again = await self._run(
            lambda: [self._ballot(question, each) for each in self._groups(question, winners)],
            size + len(question.text),
        )
        of_winners = await self._tournament(again, masses)
        return {
            option: probability * of_winners[winner]
            for group, winner in zip(found, winners, strict=True)
            for option, probability in group.items()
        }

    async def _run(self, work: Callable[[], _Result], size: int) -> _Result:
        return await self._router.work.run(self._tenant.share, work, size)

    async def _probabilities(self, ballot: _Ballot, masses: list[float]) -> dict[int, float]:
        logprobs = await self._logprobs(ballot)
        probabilities, mass = calibrated(logprobs, self._temperature)
        masses.append(mass)
        return dict(zip(ballot.options, probabilities, strict=True))

    async def _logprobs(self, ballot: _Ballot) -> Sequence[float]:
        """Return the log-probability of each label after the prompt of ``ballot``."""
        async with self._places:
            changed = Signal()
            submit = self._message(ballot)
            prompt = self._beginning
            sequence = _PartOfRequest(
                submit, self._tenant, changed.set, self._blocks, image_frames(prompt)
            )
            self._input_tokens += len(ballot.ending)
            # After the first prompt the others follow it: all answers are of the same weights.
            self._version = self._version.version_for(
                has_output=self._num_submitted > 1,
                has_images=bool(prompt.images),
                adapter=self._model.adapter,
            )
            dispatcher = self._router.dispatcher
            dispatcher.admit(self._version, [sequence])
            try:
                while not sequence.done:
                    await changed.wait()
            finally:
                dispatcher.release(sequence)
            if sequence.error is not None:
                raise sequence.error
            self._cached_tokens.append(sequence.cached_tokens)
            (scores,) = sequence.logprobs or (None,)
            if scores is None or scores.top_ids != submit.logprob_token_ids:
                raise Unavailable(
                    "The engine of this model is of an older release, which cannot answer typed "
                    "questions. Restart it.",
                    code="engine_too_old",
                )
            return scores.top

    def _message(self, ballot: _Ballot) -> Submit:
        prompt, number = self._beginning, self._num_submitted
        self._num_submitted += 1
        return submit_message(
            self._request,
            self._model,
            self._tenant,
            Prompt(
                [*prompt.token_ids, *ballot.ending],
                [*prompt.text_token_ids, *ballot.ending],
                prompt.images,
            ),
            request_id=f"{self._request_id}:{number}",
            seed=0,
            is_first=True,
            max_tokens=1,
            logprob_token_ids=tuple(label.token_id for label in ballot.labels),
            cache_salt=self.cache_salt,
            traceparent=self._traceparent,
        )


class _PartOfRequest(RemoteSequence):
    """A prompt of a request whose other prompts ran on the same weights."""

    @property
    def has_output(self) -> bool:
        return True


def _parts(question: TypedQuestion) -> list[TypedQuestion]:
    """Return the questions that are asked for ``question``: one for each label of ``multi``."""
    if question.kind == "multi":
        return [label_text(question, option) for option in question.options]
    return [question]


async def _all(work: Sequence[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Return the results of ``work``, done at the same time. If one raises, the rest is cancelled,
    and has ended when this raises."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
