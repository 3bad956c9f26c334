"""The internal form of a request for decisions, to which the shapes of all clients are parsed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from router.schemas.conversation import ChatMessage

MAX_QUESTIONS = 400
MAX_OPTIONS = 255

Kind = Literal["binary", "choice", "score", "multi"]


@dataclass(frozen=True, kw_only=True)
class Option:
    value: str | bool
    """What the client calls it. Of a binary question: true, then false."""
    text: str
    """What the model reads."""
    description: str = ""
    given: Any = None
    """A level as the client sent it: text, or JSON."""


@dataclass(frozen=True, kw_only=True)
class TypedQuestion:
    kind: Kind
    asked_as: str
    """The type in the client's request: ``noul`` or ``predicate`` for a binary question."""
    path: str
    """The field in the request, for errors: ``questions.team``."""
    name: str | None = None
    text: str = ""
    options: tuple[Option, ...] = ()
    """At least one. Levels of a score are in order, the lowest first."""
    threshold: float = 0.5
    """The least probability with which a label of ``multi`` applies, or a ``bool`` is true."""


@dataclass(frozen=True, kw_only=True)
class DecisionTask:
    """A request: a context, and questions about it."""

    messages: Sequence[ChatMessage]
    """The context, without the questions."""
    is_conversation: bool
    """Whether the context is a conversation, which is followed by the question as another message.
    Otherwise the question continues its last message."""
    questions: Sequence[TypedQuestion] = field(default_factory=list)
    context_field: str = "state"
    """The name of the context in the request, for errors."""


@dataclass(frozen=True)
class TypedAnswer:
    """Probabilities of the options of a question."""

    probabilities: Sequence[float]
    """In the order of the options. They add up to 1, except for ``multi``, whose options are
    independent. Of a binary question: of true, and of false."""
    label_mass: float
    """The probability that the model gives to all labels together, averaged over the prompts. Near
    0, the model would rather write something else."""
