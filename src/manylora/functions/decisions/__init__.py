"""Decisions about isolated functions on shared backbones: pre-loading, batching, offloading, and their bill.

All of it is pure code that is told the time, so that a live controller and a simulation run the same.
"""

from manylora.functions.decisions.artefacts import Artefact, ArtefactKind, MemoryKind, Place, Placed, PreloadProblem
from manylora.functions.decisions.batching import (
    BatchWindow,
    FirstTokenTime,
    FixedWindow,
    Window,
    deadline_margin_s,
    most_urgent,
)
from manylora.functions.decisions.billing import (
    PLATFORM,
    Interval,
    PriceList,
    Usage,
    charge,
    cost_effectiveness,
    split_evenly,
)
from manylora.functions.decisions.offload import Held, choose_offload
from manylora.functions.decisions.placement import Candidate, choose_place
from manylora.functions.decisions.preload import Preloader, choose_preload

__all__ = [
    "PLATFORM",
    "Artefact",
    "ArtefactKind",
    "BatchWindow",
    "Candidate",
    "FirstTokenTime",
    "FixedWindow",
    "Held",
    "Interval",
    "MemoryKind",
    "Place",
    "Placed",
    "PreloadProblem",
    "Preloader",
    "PriceList",
    "Usage",
    "Window",
    "charge",
    "choose_offload",
    "choose_place",
    "choose_preload",
    "cost_effectiveness",
    "deadline_margin_s",
    "most_urgent",
    "split_evenly",
]
