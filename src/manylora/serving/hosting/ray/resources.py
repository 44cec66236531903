"""The resources that an engine takes of its node, and the engines that a node has room for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from manylora.core.errors import ConfigError

__all__ = ["engine_resources", "engines_on_node"]


def engine_resources(given: Mapping[str, Any], device: str) -> dict[str, float]:
    """Return the amounts by name: ``CPU``, ``GPU``, ``memory`` in bytes, and names of the cluster's own.

    Args:
        given: Amounts, as numbers or text.
        device: The engine's device; a GPU takes one by default.

    Raises:
        ConfigError: An amount is not a number above 0.
    """
    resources = {"CPU": 1.0} | ({"GPU": 1.0} if device.startswith("cuda") else {})
    for name, amount in given.items():
        try:
            resources[name] = float(amount)
        except (TypeError, ValueError):
            resources[name] = math.nan
        if not 0 < resources[name] < math.inf:
            raise ConfigError(f"Got --ray-resource {name}={amount}, expected an amount above 0")
    return resources


def engines_on_node(node: Mapping[str, float], each: Mapping[str, float], most: int) -> int:
    """Return how many engines of a fleet may be on one node, for the shares of its cores and its memory.

    Ray fills and empties nodes later, and an engine keeps its share. So the number is the most for which there is room.

    Args:
        node: Amounts that the node has in all, by name.
        each: Amounts that an engine takes.
        most: Engines of the fleet.
    """
    room = [math.floor(node.get(name, 0.0) / amount + 1e-6) for name, amount in each.items()]
    return max(1, min([most, *room]))
