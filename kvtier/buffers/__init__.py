"""Host memory of a store: one arena of slots, recycled result buffers, and what leases hold."""

from kvtier.buffers.arena import Arena, ArenaStats
from kvtier.buffers.lease import Hold, LeaseShare
from kvtier.buffers.memory import PAGE, round_up
from kvtier.buffers.results import ResultPool, ResultStats
from kvtier.buffers.slot import Slot

__all__ = ["PAGE", "Arena", "ArenaStats", "Hold", "LeaseShare", "ResultPool", "ResultStats", "Slot", "round_up"]
