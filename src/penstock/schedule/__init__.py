"""Schedules without torch: build them, prove them, run them on paper, draw them."""

from penstock.schedule.builders import build
from penstock.schedule.costs import Costs
from penstock.schedule.ops import Op, Schedule
from penstock.schedule.placement import Placement, loop
from penstock.schedule.render import render
from penstock.schedule.simulate import simulate
from penstock.schedule.timeline import Span, Timeline
from penstock.schedule.verify import Proof, Violation, verify

__all__ = [
    "Costs",
    "Op",
    "Placement",
    "Proof",
    "Schedule",
    "Span",
    "Timeline",
    "Violation",
    "build",
    "loop",
    "render",
    "simulate",
    "verify",
]
