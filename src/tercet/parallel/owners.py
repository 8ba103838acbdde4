"""Which rank keeps the optimiser state of which parameter (ZeRO-1; parallel.md §4, §6)."""

from __future__ import annotations

import heapq
from collections.abc import Mapping


def assign_owners(costs: Mapping[str, float], world: int) -> dict[str, int]:
    """Spread parameters over *world* ranks so that every rank has about the same to do.

    Longest processing time first: the most expensive parameter goes to the rank that has least so far, at most 4/3 of
    the best possible. The result depends on names and costs alone, so all ranks compute the same without talking.

    Args:
        costs: work of every parameter, in any unit.
        world: ranks.
    """
    loads = [(0.0, rank) for rank in range(world)]
    owners = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        load, rank = heapq.heappop(loads)
        owners[name] = rank
        heapq.heappush(loads, (load + costs[name], rank))
    return owners
