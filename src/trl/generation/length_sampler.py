"""Lengths of responses, drawn per query."""

from __future__ import annotations

import numpy as np


class LengthSampler:
    """Draws a number of new tokens, uniform over `min_value, ..., max_value - 1`, by numpy's generator.

    Raises ValueError for an empty range.

    >>> LengthSampler(4, 5)()
    4
    """

    def __init__(self, min_value: int, max_value: int) -> None:
        if not 0 < min_value < max_value:
            raise ValueError(
                f"min_value must be at least 1 and below max_value, got {min_value} and {max_value}. The "
                "largest length drawn is max_value - 1."
            )
        self.min_value, self.max_value = min_value, max_value

    def __call__(self) -> int:
        """One length, in tokens."""
        return int(np.random.randint(self.min_value, self.max_value))
