"""Contrastive preference optimisation (CPO) on a preference data set.

    python examples/cpo.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/ultrafeedback_binarized \
        --output_dir cpo-model

SimPO: `--loss_type simpo --cpo_alpha 0 --beta 2.0 --simpo_gamma 1.0`.

Without a model or data at hand, `python examples/cpo.py --tiny --output_dir runs/cpo` trains a small Llama of random
weights on sums with right and wrong answers.
"""

from training_on_pairs import train_on_pairs

from trl.experimental.cpo import CPOConfig, CPOTrainer

if __name__ == "__main__":
    train_on_pairs(CPOConfig, CPOTrainer)
