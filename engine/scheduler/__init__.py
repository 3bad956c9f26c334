"""Decides, step by step, what the engine computes. Pure Python: no mlx."""

from engine.scheduler.config import SchedulerConfig
from engine.scheduler.integrity import IntegrityError
from engine.scheduler.outputs import Outputs
from engine.scheduler.scheduler import Scheduler

__all__ = ["IntegrityError", "Outputs", "Scheduler", "SchedulerConfig"]
