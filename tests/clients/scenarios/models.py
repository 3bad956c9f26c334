"""The schema of answers, for clients that take pydantic's models."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class City(BaseModel):
    """The city that is asked for."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
