r"""RLOO on problems with solutions: each completion is judged against the mean of the others of its prompt.

    accelerate launch examples/scripts/rloo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
        --dataset_name AI-MO/NuminaMath-TIR --output_dir runs/rloo --max_completion_length 1024 --use_peft --log_completions

Data, rewards and `--tiny` are those of gspo.py.
"""

from gspo import train

from trl import RLOOConfig, RLOOTrainer

if __name__ == "__main__":
    trainer = train(RLOOConfig, RLOOTrainer)
