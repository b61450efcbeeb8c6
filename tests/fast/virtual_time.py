"""The virtual-time event loop, for tests: `from tests.fast.virtual_time import settle, virtual`."""

from miles.sim.virtual_loop import Stuck, VirtualTimeLoop, run_virtual, settle, virtual

__all__ = ["Stuck", "VirtualTimeLoop", "run_virtual", "settle", "virtual"]
