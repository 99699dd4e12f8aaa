"""Known import path; the code is in `trl.rollouts.best_of_n`."""

from trl.rollouts.best_of_n import BestOfNSampler as BestOfNSampler

__all__ = ["BestOfNSampler"]
