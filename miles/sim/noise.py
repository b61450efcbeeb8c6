"""Random numbers that belong to things, not to the order in which they are asked for.

The length of an answer is a function of the seed, the group, the member and the attempt. Take a fault out of a schedule
and every other answer stays as long as it was: that is what makes a failing schedule shrinkable.
"""

from __future__ import annotations

import math

_MASK = (1 << 64) - 1


def noise(*keys: int) -> float:
    """A number in [0, 1) that depends on the keys alone."""
    x = 0x243F6A8885A308D3
    for key in keys:
        x = ((x ^ (key & _MASK)) * 0x9E3779B97F4A7C15) & _MASK
        x ^= x >> 29
    x = (x * 0xBF58476D1CE4E5B9) & _MASK
    return (x ^ (x >> 32)) / 2**64


def heavy_tail(u: float, *, median: float, alpha: float, longest: float) -> float:
    """A Pareto-tailed length for the number `u` in [0, 1): half are below `median`, none above `longest`."""
    scale = median * 0.5 ** (1 / alpha)
    return min(longest, scale * math.pow(1.0 - u, -1.0 / alpha))
