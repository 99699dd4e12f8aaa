"""Names of options that are none here: the nearest ones, and those of other libraries. Imports nothing heavy."""

import difflib
from collections.abc import Iterable

MOST = 3

# Options, a note after a colon -> the names that stand for them in Axolotl, LLaMA-Factory, other versions of TRL,
# OpenRLHF and verl, unless they are options here too. A note alone says that there is no such option here.
_STANDS_FOR = {
    "model_name_or_path": "base_model model model_name model_path model_id base_model_name pretrain pretrained_model "
    "sft_model_path adapter_name_or_path",
    "model_revision": "revision revision_of_model base_model_revision",
    "trust_remote_code": "tokenizer_trust_remote_code allow_remote_code",
    "attn_implementation: flash_attention_2, sdpa or eager": "flash_attention flash_attn use_flash_attention "
    "use_flash_attention_2 use_flash_attn sdp_attention xformers_attention eager_attention",
    "dtype": "precision model_dtype compute_dtype params_dtype",
    "use_peft: true for LoRA, with load_in_4bit true for QLoRA; without it all weights are trained": "adapter "
    "finetuning_type lora use_lora qlora peft peft_type train_type lora_on",
    "lora_r: with use_peft true": "lora_rank rank lora_dim peft_r",
    "lora_alpha: with use_peft true": "lora_scaling peft_lora_alpha",
    "lora_target_modules: names, or all-linear; with use_peft true": "lora_target target_modules lora_modules "
    "lora_target_linear",
    "lora_modules_to_save: with use_peft true": "additional_target modules_to_save",
    "use_dora: with use_peft true": "peft_use_dora",
    "use_rslora: with use_peft true": "peft_use_rslora",
    "load_in_4bit: or load_in_8bit": "quantization_bit quantization bits quantize load_in_4bits use_4bit",
    "bnb_4bit_quant_type": "quantization_type",
    "dataset_name": "dataset dataset_path data_path train_file dataset_id prompt_data train_files dataset_dir",
    "dataset_train_split": "split train_split dataset_split",
    "dataset_test_split": "eval_dataset test_datasets eval_split test_split val_files",
    "dataset_train_split: a slice such as 'train[:1000]'": "max_samples max_train_samples num_samples",
    "test_split_size: evaluation rows drawn from the training split; with eval_strategy": "val_set_size val_size "
    "validation_split_percentage eval_size",
    "dataset_streaming": "streaming_dataset",
    "dataset_num_proc": "preprocessing_num_workers dataset_processes num_proc",
    "column_mapping: old=new for each column": "field_instruction input_key output_key columns rename_columns",
    "max_length": "sequence_len cutoff_len max_seq_len model_max_length seq_length block_size max_len",
    "max_prompt_length": "prompt_max_len prompt_length",
    "max_completion_length": "max_new_tokens response_length generate_max_len max_response_length completion_length",
    "packing": "sample_packing pack_sequences neat_packing use_packing multipack",
    "padding_free": "varlen use_varlen",
    "eval_packing": "eval_sample_packing",
    "completion_only_loss: for prompts with completions; assistant_only_loss for messages": "train_on_inputs "
    "train_on_prompt train_on_responses_only mask_prompt mask_inputs",
    "chat_template_path: a Jinja file or a tokenizer; by default the tokenizer's template is used": "template "
    "chat_template conversation_template chat_template_jinja prompt_template",
    ": the command names the method: trl sft, trl reward, trl dpo, trl kto, trl grpo": "stage rl rl_type trainer_type "
    "training_method",
    ": commands have no early stopping: use load_best_model_at_end, or EarlyStoppingCallback in Python": "early_stop "
    "early_stopping early_stopping_patience early_stopping_threshold",
    "per_device_train_batch_size": "micro_batch_size batch_size train_batch_size per_device_batch_size "
    "micro_train_batch_size device_batch_size",
    "per_device_eval_batch_size": "eval_batch_size micro_eval_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation grad_accum grad_accumulation_steps accumulation_steps "
    "gradient_accumulate_every",
    "num_train_epochs": "num_epochs epochs epoch max_epochs n_epochs total_epochs",
    "max_steps": "steps num_steps total_steps max_train_steps",
    "learning_rate": "actor_learning_rate base_lr peak_lr",
    "lr_scheduler_type": "lr_scheduler scheduler lr_schedule scheduler_type",
    "warmup_steps: also a share of all steps": "warmup warmup_frac lr_warmup_ratio num_warmup_steps lr_warmup_steps",
    "optim": "optimizer optimiser optimizer_type optim_type",
    "max_grad_norm": "gradient_clipping clip_grad grad_clip max_norm gradient_clip_val",
    "gradient_checkpointing": "activation_checkpointing grad_checkpointing use_gradient_checkpointing",
    "output_dir": "output_path save_path save_dir out_dir",
    "save_steps: a share below 1 for several in a run": "saves_per_epoch save_interval save_freq",
    "eval_steps: a share below 1 for several in a run": "evals_per_epoch eval_interval eval_every test_freq",
    "report_to: wandb, tensorboard or trackio": "wandb_project use_wandb wandb use_swanlab logger log_with",
    "run_name": "wandb_name wandb_run_id wandb_run_name experiment_name",
    "resume_from_checkpoint": "auto_resume_from_checkpoints resume resume_path",
    "push_to_hub": "upload_to_hub push_hub",
    "hub_token": "hf_token hf_use_auth_token use_auth_token",
    "use_vllm": "infer_backend rollout_backend vllm",
    "beta": "rl_beta pref_beta dpo_beta kl_coef init_kl_coef kl_loss_coef kl_beta",
    "loss_type": "pref_loss dpo_loss",
    "ref_model_name_or_path": "ref_model ref_model_path reference_model",
    "reward_model_name_or_path": "reward_model reward_model_path reward_pretrain rm_path",
    "reward_funcs": "reward_function reward_fn reward_functions custom_reward_function",
    "num_generations": "n_samples_per_prompt num_rollouts rollout_n group_size num_return_sequences",
    "teacher_model_name_or_path": "teacher_model teacher teacher_model_path kd_teacher",
    "accelerate_config: a profile, such as zero3, fsdp2": "zero_stage deepspeed_config distributed_backend",
    ": losses never need logits of the whole vocabulary, so that no kernel must be chosen": "enable_liger_kernel "
    "use_unsloth liger liger_kernel use_liger unsloth",
}
# Options that configs lack have another place in Python.
_OF_COMMANDS = (
    "model_name_or_path model_revision attn_implementation dtype use_peft lora_r lora_alpha lora_dropout "
    "lora_target_modules lora_modules_to_save use_dora use_rslora load_in_4bit load_in_8bit dataset_name "
    "dataset_config dataset_train_split dataset_test_split test_split_size column_mapping reward_funcs "
    "ref_model_name_or_path reward_model_name_or_path teacher_model_name_or_path"
)
OF_COMMANDS = {*_OF_COMMANDS.split()}
_VALUES = dict.fromkeys(("dpo", "bce", "logistic"), "sigmoid: the loss of the paper")  # not of options
OTHER_NAMES = {name: meaning for meaning, names in _STANDS_FOR.items() for name in names.split()}


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """At most three known names that may be meant: the most similar, then those that `name` abbreviates.

    >>> nearest("--sise", ["size", "steps"]), nearest("epoch", ["num_train_epochs"]), nearest("x", ["size"])
    (['size'], ['num_train_epochs'], [])
    >>> nearest("adamm", ["adalomo", "adamw_torch"])
    ['adamw_torch']
    >>> nearest("lr", ["lr_scheduler_type", "learning_rate"])
    ['learning_rate', 'lr_scheduler_type']
    """
    spellings = {entry.replace("-", "_").lower(): entry for entry in known}
    wanted = _plain(name)
    alike = difflib.get_close_matches(wanted, spellings, n=1)
    first_words = {spelling.partition("_")[0]: spelling for spelling in reversed(spellings)}
    begins = [first_words[word] for word in difflib.get_close_matches(wanted, first_words, n=1, cutoff=0.8)]
    if begins and not first_words.get(wanted) and not difflib.get_close_matches(wanted, alike, cutoff=0.75):
        alike = begins
    initials = [spelling for spelling in spellings if "".join(word[:1] for word in spelling.split("_")) == wanted]
    longer = [spelling for spelling in spellings if wanted and f"_{wanted}" in f"_{spelling}"]
    return [spellings[match] for match in dict.fromkeys([*alike, *initials, *longer])][:MOST]


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """` Did you mean prefix+name?` for another library's name or else the nearest known names, or an empty string.

    >>> did_you_mean("cutoff_len", ["max_length"], prefix="--"), did_you_mean("siz", ["size"])
    (' Did you mean --max_length?', ' Did you mean size?')
    """
    names = list(known)
    option, _, note = (_VALUES | OTHER_NAMES).get(_plain(name), "").partition(": ")
    if option in names:
        return f" Did you mean {prefix}{option}?{f' ({note}.)' if note else ''}"
    if note and not option and "output_dir" in names:
        return f" {note[0].upper()}{note[1:]}."
    matches = [prefix + match for match in nearest(name, names)]
    return f" Did you mean {' or '.join(matches)}?" if matches else ""


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()
