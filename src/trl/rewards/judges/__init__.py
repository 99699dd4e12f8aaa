"""Judges of completions. Their public names are in `trl.experimental.judges`."""
