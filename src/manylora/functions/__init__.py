"""Decisions about isolated functions on shared backbones: pre-loading, batching, offloading, and their bill.

All of it is pure code that is told the time, so that a live controller and a simulation run the same.
"""

from manylora.functions.artefacts import Artefact, Kind, Memory, Place, Placed, PreloadProblem
from manylora.functions.batching import BatchWindow, FirstTokenTime, deadline_margin_s, most_urgent
from manylora.functions.billing import PriceList, Usage, charge, split_evenly
from manylora.functions.exact import solve_offload, solve_preload
from manylora.functions.offload import Held, choose_offload
from manylora.functions.preload import Preloader, choose_preload

__all__ = [
    "Artefact",
    "BatchWindow",
    "FirstTokenTime",
    "Held",
    "Kind",
    "Memory",
    "Place",
    "Placed",
    "PreloadProblem",
    "Preloader",
    "PriceList",
    "Usage",
    "charge",
    "choose_offload",
    "choose_preload",
    "deadline_margin_s",
    "most_urgent",
    "solve_offload",
    "solve_preload",
    "split_evenly",
]
