"""The states of a batch and their transitions (OpenAI, "Batch API", batch statuses)."""

from __future__ import annotations

from enum import StrEnum


class BatchState(StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        return not FOLLOWERS[self]

    @property
    def time_field(self) -> str:
        """The column with the time at which a batch entered this state."""
        return f"{self.value}_at"


_S = BatchState
FOLLOWERS: dict[BatchState, frozenset[BatchState]] = {
    _S.VALIDATING: frozenset({_S.FAILED, _S.IN_PROGRESS, _S.CANCELLING, _S.FINALIZING}),
    _S.IN_PROGRESS: frozenset({_S.FINALIZING, _S.CANCELLING}),
    _S.FINALIZING: frozenset({_S.COMPLETED, _S.EXPIRED, _S.FAILED}),
    _S.CANCELLING: frozenset({_S.CANCELLED}),
    _S.FAILED: frozenset(),
    _S.COMPLETED: frozenset(),
    _S.EXPIRED: frozenset(),
    _S.CANCELLED: frozenset(),
}
"""A batch that expires, or whose input is lost, is finalized too: what it has goes into its
files."""

CANCELLABLE = (_S.VALIDATING, _S.IN_PROGRESS)
