"""Odds-ratio preference optimisation (ORPO) on a preference data set.

    python examples/orpo.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/ultrafeedback_binarized \
        --output_dir orpo-model

Without a model or data at hand, `python examples/orpo.py --tiny --output_dir runs/orpo` trains a small Llama of random
weights on sums with right and wrong answers.
"""

from training_on_pairs import train_on_pairs

from trl.experimental.orpo import ORPOConfig, ORPOTrainer

if __name__ == "__main__":
    train_on_pairs(ORPOConfig, ORPOTrainer)
