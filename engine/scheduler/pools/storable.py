"""What the kvstore may keep."""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan import BlockName


@dataclass(eq=False, slots=True)
class Storable:
    """The content of a full page, or a snapshot."""

    id: int  # never used again
    hash: bytes  # of the last block
    stored: bool = False  # whether the kvstore has it

    @property
    def is_snapshot(self) -> bool:
        return False

    @property
    def name(self) -> BlockName:
        return BlockName(self.id, self.hash, self.is_snapshot)
