"""Names of the columns of an `Experience`; a column is absent where nothing fills it."""

from __future__ import annotations

# Per completion token.
SAMPLING_LOGPS = "sampling_logps"  # under the distribution that was sampled from
SAMPLING_KEPT = "sampling_kept"  # log of the probability mass that truncated sampling kept
TOOL_OUTPUT = "tool_output"  # bool: written by a tool
TRAINED = "trained"  # bool
OLD = "old_logps"  # of the policy at the start of the rollout batch
REF = "ref_logps"  # of the reference
TEACHER = "teacher_logps"  # of the teacher, at its own temperature
STUDENT = "student_logps"  # of the policy at the teacher's temperature, where that is not the sampling's
VALUES = "values"  # of the value model
RETURNS = "returns"  # what the value model learns
CORRECTION = "correction"  # importance weight of the sampler's mismatch
CHOSEN = "chosen"  # bool: has a weight in this optimiser step

# Per completion.
STOPPED = "stopped"  # bool: ended by a stop token or string
SCORES = "scores"  # weighted sum of the rewards, NaN where no source scored it
REWARD = "reward"  # what the method makes of it
ADVANTAGE = "advantage"  # of a completion, or of each token where it is a column per token
LENGTH = "length"  # completion tokens that the policy sampled
MEAN_LENGTH = "mean_length"  # mean length of the rollout batch
FILTERED = "filtered"  # bool: not among those that are learned from
REPLAYED = "replayed"  # bool: sampled for an earlier rollout batch
