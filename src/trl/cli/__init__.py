"""The `trl` command. Imports nothing heavy, so that `trl --help` answers at once."""

from trl.cli.main import main

__all__ = ["main"]
