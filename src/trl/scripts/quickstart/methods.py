"""The methods that the quickstart can end with, and the stages that lead there. Names only: `--help` loads no torch."""

# Every method begins with the stages of fine-tuning, so that runs of several can share them; some need the reward model too.
FINE_TUNED = ("base", "sft")
REWARDED = (*FINE_TUNED, "reward")

METHODS: dict[str, tuple[str, ...]] = {
    "ppo": (*REWARDED, "ppo"),
    "dpo": (*REWARDED, "dpo"),
    "grpo": (*FINE_TUNED, "grpo"),
    "rloo": (*FINE_TUNED, "rloo"),
}
DEFAULT_METHOD = "ppo"
