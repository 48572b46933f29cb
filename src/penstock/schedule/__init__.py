"""Schedules without torch: build them, prove them, run them on paper, draw them."""

from penstock.schedule.choose import ScheduleConfig, build
from penstock.schedule.files import dump, load
from penstock.schedule.ops import Op, Pair, Placement, Schedule, Violation, both_ways, loop, wave
from penstock.schedule.render import render
from penstock.schedule.search import Found, search
from penstock.schedule.simulation.compare import Entry, compare
from penstock.schedule.simulation.costs import Costs
from penstock.schedule.simulation.sample import Sampled, sample, slow_rank_costs
from penstock.schedule.simulation.simulate import simulate
from penstock.schedule.simulation.timeline import DeviceTime, Idle, Reduction, Span, Timeline, Wait
from penstock.schedule.verify import Proof, verify

__all__ = [
    "Costs",
    "DeviceTime",
    "Entry",
    "Found",
    "Idle",
    "Op",
    "Pair",
    "Placement",
    "Proof",
    "Reduction",
    "Sampled",
    "Schedule",
    "ScheduleConfig",
    "Span",
    "Timeline",
    "Violation",
    "Wait",
    "both_ways",
    "build",
    "compare",
    "dump",
    "load",
    "loop",
    "render",
    "sample",
    "search",
    "simulate",
    "slow_rank_costs",
    "verify",
    "wave",
]
