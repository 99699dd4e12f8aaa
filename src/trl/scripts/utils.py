"""Known import path of what scripts share; the code stands in the modules named below."""

from trl.data.mixtures import DatasetConfig, DatasetMixtureConfig, get_dataset
from trl.scripts.arguments import ScriptArguments
from trl.scripts.checkout import get_git_commit_hash
from trl.scripts.parser import TrlParser
from trl.scripts.quiet import init_zero_verbose

__all__ = [
    "DatasetConfig",
    "DatasetMixtureConfig",
    "ScriptArguments",
    "TrlParser",
    "get_dataset",
    "get_git_commit_hash",
    "init_zero_verbose",
]
