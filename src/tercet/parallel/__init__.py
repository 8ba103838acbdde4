"""Several processes for one run: who they are, what they exchange, who owns which parameter."""

from tercet.parallel.owners import assign_owners
from tercet.parallel.processes import join
from tercet.parallel.ranks import Ranks

__all__ = ["Ranks", "assign_owners", "join"]
