"""The forced end of reasoning, for a sequence that has used up its budget.

Whether an output is forced depends only on the outputs before it. A sequence that is preempted, or
resumed on another engine, therefore continues as it would have.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.wire import ThinkingBudget


class ThinkingProgress:
    """Follows the outputs of one sequence through its reasoning.

    All reasoning of an answer counts. If the model begins it again, it gets one more token.
    """

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._start, self._end = tuple(budget.start_ids), tuple(budget.end_ids)
        self._inside = budget.is_open
        self._block = budget.is_open  # whether the current reasoning may be ended already
        self._used = 0
        self._outputs: list[int] = []

    @property
    def num_outputs(self) -> int:
        """The number of outputs it has followed."""
        return len(self._outputs)

    def follow(self, outputs: Sequence[int]) -> None:
        """Follow ``outputs``, which come after the earlier ones."""
        for token in outputs:
            self._outputs.append(token)
            if self._inside:
                self._used += 1
                self._block = True
                self._inside = not self._ends_with(self._end)
            elif self._start and self._ends_with(self._start):
                self._inside, self._block = True, False

    def forced(self) -> int | None:
        """Return the token that the next output must be, None if it may be any."""
        if not (self._inside and self._block and self._used >= self._budget.tokens):
            return None
        most = min(len(self._end) - 1, self._used)
        begun = next(n for n in range(most, -1, -1) if self._ends_with(self._end[:n]))
        return self._end[begun]

    def may_force_after_next(self) -> bool:
        """Whether `forced` may return a token after one more output, whatever it is."""
        return self._inside and self._used + 1 >= self._budget.tokens

    def num_unforced(self, outputs: Sequence[int]) -> int:
        """Return how many of ``outputs`` may come next without one of them, or the one after them,
        being forced."""
        known = self._inside, self._block, self._used, len(self._outputs)
        count = 0
        if self.forced() is None:
            for token in outputs:
                self.follow([token])
                if self.forced() is not None:
                    break
                count += 1
        self._inside, self._block, self._used, end = known
        del self._outputs[end:]
        return count

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        count = len(tokens)
        return not count or tuple(self._outputs[-count:]) == tokens
