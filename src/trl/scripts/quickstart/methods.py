"""The methods that the quickstart can end with, and the stages that lead there. Names only: `--help` loads no torch."""

PREPARATION = (
    "base",
    "sft",
    "reward",
)  # every method begins with these, so that runs of several can share them

METHODS: dict[str, tuple[str, ...]] = {
    "ppo": (*PREPARATION, "ppo"),
    "dpo": (*PREPARATION, "dpo"),
}
DEFAULT_METHOD = "ppo"
