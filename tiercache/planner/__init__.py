"""The control plane: decides which block is where and what moves; see `core`."""

from tiercache.planner.core import Found, Planner
from tiercache.planner.counters import LevelCounters, PlannerCounters, RemoteCounters
from tiercache.planner.explain import Explanation, Stretch
from tiercache.planner.loads import Load
from tiercache.planner.results import Outcome
from tiercache.planner.state import Limits, RemoteLimits
from tiercache.planner.stores import StorePlan

__all__ = [
    "Explanation",
    "Found",
    "LevelCounters",
    "Limits",
    "Load",
    "Outcome",
    "Planner",
    "PlannerCounters",
    "RemoteCounters",
    "RemoteLimits",
    "StorePlan",
    "Stretch",
]
