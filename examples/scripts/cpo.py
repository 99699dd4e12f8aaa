"""Contrastive preference optimisation (CPO) on pairs of a better and a worse answer.

    accelerate launch examples/scripts/cpo.py --model_name_or_path Qwen/Qwen2-0.5B-Instruct \
        --dataset_name trl-lib/ultrafeedback_binarized --num_train_epochs 1 --output_dir runs/cpo

SimPO: `--loss_type simpo --cpo_alpha 0 --beta 2.0 --simpo_gamma 1.0`. `--use_peft` trains an adapter.
"""

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.scripts.training import load_inputs

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, CPOConfig, ModelConfig, DatasetMixtureConfig))
    script_args, training_args, model_args, dataset_args = parser.parse_args_and_config()
    train_rows, eval_rows = load_inputs(script_args, training_args, model_args, dataset_args)

    trainer = CPOTrainer(
        model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
