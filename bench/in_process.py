"""Scheduler and executor without processes, sockets and HTTP: the engine's own speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from engine.backend.blas import load_fast_blas
from shared.settings import Settings
from shared.wire import Delta, SamplingParams, Submit

if TYPE_CHECKING:  # these import mlx
    from engine.grammar.cache import GrammarCache
    from engine.plan import Plan
    from engine.speculation.speculator import Speculator


class InProcessEngine:
    """The replica that `services.processes.engine` would serve, driven by a plain loop."""

    def __init__(
        self,
        model: str,
        kv_bits: Literal[4, 8, 16] = 16,
        precision: Literal["exact", "compact", "fast", "auto"] = "auto",
        **others: Any,
    ) -> None:
        """``others`` are further settings of the server. By default nothing is drafted."""
        load_fast_blas()
        from engine import device
        from engine.model.load import load, resolve
        from engine.replica.build import build_replica

        device.prepare()
        self.loaded = load(resolve(model))
        self.settings = Settings(
            model=model,
            kv_bits=kv_bits,
            cpu_precision=precision,
            max_batch_size=16,
            completion_batch_size=32,
            no_ssd=True,
            **{"spec_decode": "none", **others},
        )
        self.replica = build_replica(self.loaded, self.settings)
        self._config = self.replica.scheduler.config
        self._grammars: GrammarCache | None = None
        self._number = 0
        self._begin()

    @property
    def own_type_bytes(self) -> int:
        """Bytes of one number in the model's compute type."""
        return int(self.loaded.model.model.norm.weight.dtype.size)

    def use_grammars(self) -> None:
        """Accept requests with grammars from now on."""
        from engine.grammar.cache import GrammarCache
        from engine.replica.intake import tokenizer_spec_of
        from engine.sampling.masks import GrammarMasker

        self._grammars = GrammarCache(tokenizer_spec_of(self.loaded).load())
        masker = GrammarMasker(self._grammars, self.loaded.vocab_size)
        self.replica.executor.use_grammars(masker)
        if self.replica.draft_model is not None:
            self.replica.draft_model.use_grammars(self._grammars)

    def with_same_weights(self) -> InProcessEngine:
        """Return an engine without drafts that has the same weights in memory, but slots and blocks
        of its own."""
        from engine.executor.batched import BatchedExecutor

        own = self.replica.executor
        if not isinstance(own, BatchedExecutor):
            raise SystemExit("this model's requests are computed one by one")
        other = copy(self)
        executor = BatchedExecutor(
            self.loaded.model, own.layout, own.spec.page_tokens, own.batch_class
        )
        other.replica = replace(self.replica, executor=executor, draft_model=None)
        other.renew(None)
        return other

    def renew(self, speculator: Speculator | None, **config: Any) -> None:
        """Start again with an empty cache and changes to the scheduler's ``config``."""
        from engine.scheduler import Scheduler

        self.replica.executor.reset()
        changed = replace(self._config, **config)
        self.replica = replace(self.replica, scheduler=Scheduler(changed, speculator=speculator))
        self._begin()

    def _begin(self) -> None:
        from engine.executor.runner import StepRunner

        self._steps = StepRunner(self.replica.executor)
        self._plans: dict[int, Plan] = {}
        """Plans that were dispatched, but whose results are not known, by number."""

    def encode(self, text: str, *, is_chat: bool) -> list[int]:
        """Return the tokens of ``text``; with ``is_chat``, as a question in the model's
        template."""
        if not is_chat:
            return list(self.loaded.tokenizer.encode(text))
        messages = [{"role": "user", "content": text}]
        return list(self.loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True))

    def step(self) -> list[Delta]:
        """Run one step and return its messages."""
        return self._step()[1]

    def rate(self, texts: list[str], max_tokens: int) -> float:
        """Return the tokens per second of greedy completions of ``texts``.

        The first one starts alone, as in a server: others arrive while its prompt is computed."""
        encode = self.loaded.tokenizer.encode
        started = time.perf_counter()
        tokens = 0
        for number, text in enumerate(texts):
            self.submit(encode(text), max_tokens, self.loaded.eos_token_ids)
            if not number:
                tokens += sum(len(delta.token_ids) for delta in self._step()[1])
        tokens += sum(len(delta.token_ids) for delta in self._finish())
        return tokens / (time.perf_counter() - started)

    def step_s(
        self,
        prompts: Sequence[list[int]],
        steps: int,
        warm_up_steps: int,
    ) -> float:
        """Return the median seconds of ``steps`` in which all ``prompts`` decode.

        Prefixes computed before come from the cache.
        """
        requests = [self.submit(prompt, 100 * steps + 1000) for prompt in prompts]
        scheduler = self.replica.scheduler
        seconds: list[float] = []
        while len(seconds) < steps + warm_up_steps:
            if scheduler.idle:
                raise RuntimeError("some ended before all had begun")
            begun = time.perf_counter()
            rows, _ = self._step()
            if rows == len(prompts):
                seconds.append(time.perf_counter() - begun)
        for request in requests:
            scheduler.abort(request)
        while not scheduler.idle:
            self._step()
        return statistics.median(seconds[warm_up_steps:])

    def answers(
        self, questions: Sequence[str], max_tokens: int
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return the prompts of ``questions``, and the greedy answers with their end tokens."""
        asked = [self.encode(question, is_chat=True) for question in questions]
        stop = self.loaded.eos_token_ids
        names = [self.submit(prompt, max_tokens, stop) for prompt in asked]
        deltas = self._finish()
        answers = [
            [t for d in deltas if d.request_id == name for t in d.token_ids] for name in names
        ]
        return asked, answers

    def texts(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        after_step: Callable[[], None] = lambda: None,
    ) -> list[list[int]]:
        """Return the greedy continuations of ``prompts``, which run at once. None ends early."""
        names = [self.submit(prompt, max_tokens) for prompt in prompts]
        found: dict[str, list[int]] = {name: [] for name in names}
        while not self.replica.scheduler.idle:
            for delta in self._step()[1]:
                if delta.finish == "error":
                    raise RuntimeError(f"a request failed: {delta}")
                found[delta.request_id] += delta.token_ids
            after_step()
        return list(found.values())

    def expected(self, token_ids: list[int]) -> list[int]:
        """Return the most likely token after each of ``token_ids`` except the last."""
        self.submit(token_ids, 1, prompt_logprobs=1)
        scores = [score for delta in self._finish() for score in delta.prompt_logprobs or ()]
        return [score.top_ids[0] for score in scores]

    def page(self, text: str) -> tuple[bytes | memoryview, ...]:
        """Return the payload of the first page of ``text``, as sent to the kvstore."""
        from engine.plan import Chunk, Export, Plan, fixed_tables

        tokens, executor = self.loaded.tokenizer.encode(text), self.replica.executor
        tables = fixed_tables(1, len(tokens), executor.spec.page_tokens)
        plan = Plan(
            step=0,
            num_pages=len(tables[0].pages),
            tables=tables,
            chunks=(Chunk(0, 0, tuple(tokens)),),
            exports=(Export(0, 0),),
        )
        result = executor.dispatch(plan).read()
        executor.reset()
        return result.exported[0].payload

    def _finish(self) -> list[Delta]:
        """Run until nothing is left to do; return all deltas."""
        deltas: list[Delta] = []
        while not self.replica.scheduler.idle:
            deltas += self._step()[1]
        return deltas

    def submit(
        self,
        token_ids: list[int],
        max_tokens: int,
        stop: Iterable[int] = (),
        **fields: Any,
    ) -> str:
        """Submit a request, greedy unless ``fields`` of `Submit` specify otherwise. Return its
        id."""
        self._number += 1
        submit = Submit(
            request_id=str(self._number),
            attempt=0,
            token_ids=token_ids,
            max_tokens=max_tokens,
            stop_token_ids=list(stop),
            **{"sampling": SamplingParams(seed=0), **fields},
        )
        compiled = None
        if submit.grammar is not None and self._grammars is not None:
            compiled = self._grammars.get(submit.grammar)
        self.replica.scheduler.submit(submit, compiled)
        return submit.request_id

    def _step(self) -> tuple[int, list[Delta]]:
        """Run the next plan and wait for it, or with look-ahead for the previous one.

        Return the rows of a plan of decodes only, and the deltas."""
        scheduler, rows = self.replica.scheduler, 0
        plan = scheduler.schedule()
        if plan is not None:
            self._plans[plan.step] = plan
        for result in self._steps.results(plan):
            scheduler.apply(result)
            done = self._plans.pop(result.step)
            rows = 0 if done.chunks else len(done.decodes)
        return rows, scheduler.take_outputs().deltas
