"""A draft model beside its target: the text is the one without it, and it is in the ledger."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.backend.gpu_path import forced_gpu_path
from engine.executor.base import PendingStep
from engine.model.errors import ModelUnavailable
from engine.plan import Plan
from engine.replica.draft_model import check_vocabulary
from shared import wire
from shared.wire import SamplingParams
from tests.engine.conftest import Wrap
from tests.engine.replica import test_drafts as drafts
from tests.engine.whole import Whole
from tests.tiny_models import make_tiny

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": drafts.REQUESTS["sampled"],
    "hot": {"sampling": SamplingParams(seed=5, temperature=1.5, logit_bias=[(9, 2.0)])},
    "penalized": {"sampling": SamplingParams(seed=3, temperature=0.7, repetition_penalty=1.3)},
    "bound": drafts.REQUESTS["bound"],
}
UNCHANGED = "greedy", "sampled", "hot", "penalized"
"""Those whose drafts are chosen exactly as their tokens are."""
TOKENS = 40


class Drafted:
    """A target with a draft model, and its texts without drafts."""

    def __init__(
        self,
        path: Path,
        draft: Path,
        *,
        names: Sequence[str] = tuple(REQUESTS),
        longest: int = 90,
        **settings: Any,
    ) -> None:
        """The requests are those of ``names``. Prompts have up to ``longest`` tokens."""
        self.names = names
        given = {"no_ssd": True, "num_blocks": 300, "spec_decode": "draft"} | settings
        given |= {"draft_model_path": str(draft), "spec_decode_dynamic": False}
        self.longest = longest
        self.whole = Whole(path, **given)
        self.whole.use_grammars()
        self.start()
        for seq in self.whole.scheduler.sequences.live.values():
            seq.drafts = None
        self.whole.run()
        assert not self.whole.drafts
        self.expected = self.whole.texts

    def prompt(self, name: str) -> list[int]:
        return drafts.prompt(name, self.longest)

    def start(self, names: Sequence[str] = ()) -> None:
        for name in names or self.names:
            self.whole.submit(name, self.prompt(name), TOKENS, **REQUESTS[name])

    def check(self, names: Sequence[str] = ()) -> None:
        """Run requests with drafts, all if none are named."""
        self.start(names)
        self.whole.run()
        for name in names or self.names:
            assert self.whole.texts[name] == self.expected[name], name

    def check_all(self, look_ahead: bool = False, **config: Any) -> None:
        """Run all requests with drafts in a new engine."""
        self.whole.renew(look_ahead, **config)
        self.check()
        assert self.counts.drafted > 60

    def assert_own(self) -> None:
        """Show that nearly all drafts were accepted."""
        assert self.counts.accepted > 0.97 * self.counts.drafted
        assert self.counts.accepted / self.counts.proposals > 4.5  # of five

    @property
    def counts(self) -> wire.DraftCounts:
        return self.whole.drafts["draft"]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with other weights than any target's."""
    path = tmp_path_factory.mktemp("draft")
    return make_tiny("llama", path, seed=9, num_hidden_layers=1)


@pytest.fixture(scope="module")
def exact(llama: Path, draft: Path) -> Drafted:
    """A target with 8-bit KV. Most prompts are longer than what the draft model begins with."""
    settings: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 16}
    return Drafted(llama, draft, draft_context_len=16, **settings)


@pytest.fixture(scope="module")
def own(llama: Path) -> Drafted:
    """A model that is its own draft model, for two sequences at once."""
    return self_drafted(llama)


def self_drafted(path: Path) -> Drafted:
    options: dict[str, Any] = {"draft_context_len": 32, "spec_decode_disable_batch_size": 2}
    return Drafted(path, path, longest=20, **options)


def test_with_8_bits_texts_are_those_without_a_draft_model(exact: Drafted) -> None:
    exact.check_all()


def test_texts_of_a_hybrid_are_those_without_a_draft_model(
    tiny_model: Callable[..., Path], draft: Path
) -> None:
    Drafted(tiny_model("jamba"), draft, names=("greedy", "penalized")).check_all()


def test_a_model_accepts_nearly_all_of_its_own_drafts(own: Drafted) -> None:
    """Greedy, sampled and with penalties, since noise and history are the same."""
    own.whole.renew(False)
    for group in (UNCHANGED[:2], UNCHANGED[2:], UNCHANGED[:1]):
        own.check(group)
    own.assert_own()


def test_a_draft_model_drafts_what_a_grammar_allows(own: Drafted, look_ahead: bool) -> None:
    """Alone, and beside a sequence without one."""
    own.whole.renew(look_ahead)
    for group in (("bound",), ("bound", "greedy")):
        own.check(group)
    own.assert_own()


def test_a_model_accepts_nearly_all_of_its_own_drafts_on_the_path_of_a_gpu(llama: Path) -> None:
    with forced_gpu_path():
        drafted = self_drafted(llama)
        drafted.whole.renew(look_ahead=True)
        drafted.check(UNCHANGED[:2])
        drafted.assert_own()
        drafted.check_all(look_ahead=True, max_batch_size=2)


def test_a_sequence_of_more_tokens_than_a_slot_holds_is_drafted_to_its_end(own: Drafted) -> None:
    own.whole.renew(False)
    assert len(own.whole.serve("long", [5, 6, 7], 400)) == 400
    assert own.counts.drafted > 4.8 * own.counts.proposals  # it never stopped
    assert own.counts.accepted + own.counts.proposals > 390


@pytest.mark.usefixtures("nothing_reserved")
def test_preempted_and_resumed_sequences_go_on_as_without_a_draft_model(exact: Drafted) -> None:
    config = exact.whole.replica.scheduler.config
    limit_bytes = 4 * config.page_bytes + config.gather_bytes([4])
    exact.whole.renew(False, limit_bytes=limit_bytes)
    exact.check(("bound", *UNCHANGED))
    assert exact.counts.drafted > 60
    assert exact.whole.scheduler.stats().preemptions_total
    exact.whole.renew(False)
    for name, text in exact.expected.items():
        fields = REQUESTS[name] | {"generated": text[:17]}
        exact.whole.submit(name, exact.prompt(name), TOKENS, **fields)
    exact.whole.run()
    assert exact.whole.texts == exact.expected
    assert exact.counts.drafted > 50


def test_a_draft_model_that_raises_leaves_texts_as_they_are(exact: Drafted, wrap: Wrap) -> None:
    model, calls = exact.whole.replica.draft_model, iter(range(1000))
    assert model is not None

    @wrap(model.executor, "dispatch")
    def raises(dispatch: Callable[[Plan], PendingStep], plan: Plan) -> PendingStep:
        if next(calls) in (5, 40):
            raise RuntimeError("[malloc] Unable to allocate")
        return dispatch(plan)

    exact.check_all()
    assert next(calls) > 60  # it went on after both


def test_its_slots_are_in_the_ledger_and_its_weights_leave_less_for_blocks(
    llama: Path, draft: Path
) -> None:
    def stats(**settings: Any) -> wire.EngineStats:
        whole = Whole(llama, no_ssd=True, memory_gb=2.5, **settings)
        whole.serve("a", [5, 6, 7], 30)
        whole.scheduler.clear_cache()
        return whole.scheduler.stats()

    plain = stats()
    drafted = stats(spec_decode="draft", draft_model_path=str(draft))
    # One layer of 2 heads with keys and values of 16 floats each; 8 slots of 128 + 256 tokens, in
    # pages and unpacked.
    slots_bytes = 2 * 8 * (128 + 256) * 2 * 2 * 16 * 4
    assert drafted.unevictable_bytes - plain.unevictable_bytes == slots_bytes
    assert drafted.used_blocks > plain.used_blocks
    assert drafted.limit_bytes < plain.limit_bytes  # its weights


def test_another_vocabulary_is_refused_at_the_start(llama: Path, tmp_path: Path) -> None:
    other = make_tiny("llama", tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted(vocab)[40:42]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelUnavailable, match="another vocabulary than the model, as 2 tokens"):
        Whole(llama, spec_decode="draft", draft_model_path=str(other))
    with pytest.raises(ModelUnavailable, match="'b' is not there and 1 in the model's"):
        check_vocabulary({"a": 0, "b": 1}, {"a": 0}, "x")


def test_a_draft_model_that_cannot_go_back_is_refused(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(ModelUnavailable, match=r"cannot draft with .*: its recurrent"):
        Whole(tiny_model("llama"), spec_decode="draft", draft_model_path=str(tiny_model("mamba")))


def test_other_end_tokens_are_warned_about(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = make_tiny("llama", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    Whole(llama, spec_decode="auto", draft_model_path=str(other))
    assert "the draft model ends answers with tokens" in caplog.text
