"""Mixed preference optimisation (MPO) of a vision-language model: DPO with a weighted sum of three losses.

    accelerate launch examples/scripts/mpo_vlm.py --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \
        --dataset_name HuggingFaceH4/rlaif-v_formatted --output_dir runs/mpo-vlm --dtype bfloat16 --use_peft

`--loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1.0`, the paper's mixture (arXiv:2411.10442), is the default. Data and
`--tiny` are those of dpo_vlm.py.
"""

from dpo_vlm import train

if __name__ == "__main__":
    trainer = train(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0])
