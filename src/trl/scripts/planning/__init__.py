"""`trl plan`: the memory of a run, from the model's config alone."""

METHODS = (
    "sft", "reward", "dpo", "orpo", "cpo", "kto", "bco", "gkd", "distillation", "grpo", "rloo", "online-dpo", "ppo"
)  # fmt: skip
