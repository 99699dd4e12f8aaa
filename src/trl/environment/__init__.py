"""Known import path; the code is in `trl.rollouts`."""

from trl.rollouts.text_environment import TextEnvironment as TextEnvironment
from trl.rollouts.text_history import TextHistory as TextHistory
