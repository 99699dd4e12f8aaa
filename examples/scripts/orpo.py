"""Odds-ratio preference optimisation (ORPO) on a preference data set.

    accelerate launch examples/scripts/orpo.py --model_name_or_path Qwen/Qwen2-0.5B-Instruct \
        --dataset_name trl-lib/ultrafeedback_binarized --num_train_epochs 1 --output_dir runs/orpo

Data and options are those of cpo.py. `--use_peft` trains an adapter. `--tiny` trains a small Llama of random weights to prefer calm
answers to rude ones.
"""

from cpo import train

from trl.experimental.orpo import ORPOConfig, ORPOTrainer

if __name__ == "__main__":
    trainer = train(ORPOConfig, ORPOTrainer)
