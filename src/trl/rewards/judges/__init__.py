"""Judges: what says whether a completion is good, or which is better. Their public names stand in `trl.experimental.judges`."""
