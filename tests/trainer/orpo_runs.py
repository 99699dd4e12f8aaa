"""ORPO on the eight fixed pairs of `dpo_runs`."""

import functools

from tests.trainer import cpo_runs
from trl.trainer.orpo_config import ORPOConfig
from trl.trainer.orpo_trainer import ORPOTrainer

make = functools.partial(cpo_runs.make, kinds=(ORPOTrainer, ORPOConfig))
