"""Names by import path: the one table behind `trl` and every path that programs of 0.4-1.16 import.

A path without a file of its own is served from here by the finder in `trl._lazy`; the others read their row with
`attach(__name__)`. Each row says where names live: `{home: "name other known_name=name_at_home"}`.
"""

Row = dict[str, str]

# fmt: off
_JUDGES: Row = {"trl.rewards.judges": "AllTrueJudge BaseBinaryJudge BaseJudge BasePairwiseJudge BaseRankJudge "
    "HfPairwiseJudge OpenAIPairwiseJudge PairRMJudge RandomPairwiseJudge RandomRankJudge"}
_JUDGE_PATHS: Row = {"trl.rewards.judges": _JUDGES["trl.rewards.judges"] + " DEFAULT_PAIRWISE_SYSTEM_PROMPT=QUESTION"}
_CALLBACKS: Row = {"trl.trainer.callbacks.bema": "BEMACallback",
    "trl.trainer.callbacks.log_completions": "LogCompletionsCallback",
    "trl.trainer.callbacks.merge_model": "MergeModelCallback",
    "trl.trainer.callbacks.rich_progress": "RichProgressCallback",
    "trl.trainer.callbacks.sync_ref_model": "SyncRefModelCallback",
    "trl.trainer.callbacks.weave": "WeaveCallback",
    "trl.trainer.callbacks.win_rate": "WinRateCallback"}
_UPPER = ("bco", "cpo", "ddpo", "dpo", "gkd", "grpo", "kto", "orpo", "ppo", "prm", "rloo", "sft")
_METHODS = {**{name: name.upper() for name in _UPPER}, "alignprop": "AlignProp", "distillation": "Distillation",
    "iterative_sft": "IterativeSFT", "nash_md": "NashMD", "online_dpo": "OnlineDPO", "reward": "Reward", "xpo": "XPO"}
_TRAINERS: Row = {**{f"trl.trainer.{name}_config": f"{method}Config" for name, method in _METHODS.items()},
    **{f"trl.trainer.{name}_trainer": f"{method}Trainer" for name, method in _METHODS.items()},
    "trl.trainer.dpo_config": "DPOConfig FDivergenceConstants FDivergenceType",
    "trl.experimental.ppo.ppo_config": "PPOv2Config=PPOConfig",
    "trl.experimental.ppo.ppo_trainer": "PPOv2Trainer=PPOTrainer", "trl.options.model": "ModelConfig"}
_VALUE_HEADS: Row = {
    "trl.models.value_head": "AutoModelForCausalLMWithValueHead AutoModelForSeq2SeqLMWithValueHead",
    "trl.models.value_wrapper": "PreTrainedModelWrapper",
    "trl.models.reference_weights": "create_reference_model"}
_DIFFUSION: Row = {"trl.models.diffusion.ddim": "DDPOSchedulerOutput",
    "trl.models.diffusion.stable_diffusion": "DDPOPipelineOutput DDPOStableDiffusionPipeline "
    "DefaultDDPOStableDiffusionPipeline"}
_MODEL_SETUP: Row = {"trl.models.chat_setup": "clone_chat_template setup_chat_format",
    "trl.models.distributed": "prepare_deepspeed prepare_fsdp unwrap_model_for_generation",
    "trl.models.peft": "prepare_model_for_kbit_training prepare_peft_model"}
_ROWS: Row = {"trl.data.formats": "extract_prompt is_conversational is_conversational_from_value "
    "maybe_convert_to_chatml maybe_extract_prompt maybe_unpair_preference_dataset prepare_multimodal_messages "
    "prepare_multimodal_messages_vllm unpair_preference_dataset",
    "trl.data.packing": "pack_dataset", "trl.data.templates": "apply_chat_template maybe_apply_chat_template",
    "trl.data.ragged": "truncate_dataset"}
_SCRIPTS: Row = {"trl.data.sources": "DatasetMixtureConfig get_dataset",
    "trl.scripts.arguments": "ScriptArguments", "trl.scripts.parser": "TrlParser",
    "trl.scripts.running": "init_zero_verbose"}
_COMMANDS: Row = {"trl.scripts.arguments": "DPOScriptArguments RewardScriptArguments SFTScriptArguments",
    "trl.scripts.config_file": "YamlConfigParser", "trl.scripts.parser": "TrlParser",
    "trl.scripts.running": "init_zero_verbose"}
_MODEL_OPTIONS: Row = {"trl.models.peft": "get_kbit_device_map get_peft_config get_quantization_config"}
_DATA_SET_PPO: Row = {"trl.models.scoring.values": "INVALID_LOGPROB PolicyAndValueWrapper"}
_GRPO_PARTS: Row = {"trl.rewards.source": "RewardFunc", "trl.rollouts.schedule": "RepeatSampler",
    "trl.tensors.statistics": "nanmax nanmin nanstd"}

NAMES: dict[str, Row] = {
    "trl": {**_TRAINERS, **_JUDGES, **_CALLBACKS, **_VALUE_HEADS, **_DIFFUSION,
        "trl.models.value_head": f"{_VALUE_HEADS['trl.models.value_head']} SUPPORTED_ARCHITECTURES", **_ROWS, **
        _MODEL_OPTIONS, "trl.models.chat_setup": "clone_chat_template setup_chat_format",
        "trl.data.sources": "DatasetMixtureConfig get_dataset", "trl.data.arithmetic": "make_data",
        "trl.scripts.arguments": "DPOScriptArguments SFTScriptArguments ScriptArguments",
        "trl.scripts.parser": "TrlParser", "trl.scripts.plan": "plan", "trl.scripts.running": "init_zero_verbose",
        "trl.collators.completion_only": "DataCollatorForCompletionOnlyLM", "trl.rollouts.best_of_n": "BestOfNSampler",
        "trl.agents.text_environment": "TextEnvironment TextHistory",
        "trl.options.packages": "is_diffusers_available is_liger_kernel_available is_llmblender_available "
        "is_peft_available is_wandb_available", "transformers.trainer_utils": "set_seed"},
    "trl.chat_template_utils": {"trl.data.templates": "add_response_schema apply_chat_template "
        "get_training_chat_template is_chat_template_prefix_preserving parse_response "
        "qwen3_schema=QWEN_RESPONSE_TEMPLATE", "trl.data.training_templates": "qwen3_chat_template=QWEN3_TEMPLATE "
        "qwen3_training_chat_template=QWEN3_TRAINING_TEMPLATE"},
    "trl.commands": _COMMANDS,
    "trl.commands.cli": {"trl.cli.main": "SUPPORTED_COMMANDS=COMMANDS main"},
    "trl.commands.cli_utils": {**_COMMANDS, "trl.scripts.chat": "ChatArguments"},
    "trl.core": {"trl.collators.rows": "build_bert_batch_from_txt",
        "trl.generation.transformers.padded_queries": "LengthSampler respond_to_batch top_k_top_p_filtering",
        "trl.models.switches": "PPODecorators", "trl.reporting.step_statistics": "WANDB_PADDING add_suffix "
        "average_torch_dicts convert_to_scalar stack_dicts stats_to_np", "trl.options.shared": "flatten_dict",
        "trl.tensors.padding": "listify_batch pad_to_size", "trl.tensors.statistics": "clip_by_value "
        "entropy_from_logits logprobs_from_logits masked_mean masked_var masked_whiten randn_tensor whiten",
        "transformers.trainer_utils": "set_seed"},
    "trl.data_utils": {**_ROWS, "trl.data.formats": f"{_ROWS['trl.data.formats']} DatasetType"},
    "trl.env_utils": {"accelerate.utils": "strtobool=str_to_bool"},
    "trl.environment": {"trl.agents.text_environment": "TextEnvironment TextHistory"},
    "trl.environment.base_environment": {"trl.generation.transformers.padded_queries": "StringStoppingCriteria",
        "trl.agents.text_environment": "TextEnvironment TextHistory"},
    "trl.experimental": {"trl.options.packages": "TRLExperimentalWarning"},
    "trl.experimental.agents": {"trl.agents.endpoint": "Endpoint", "trl.agents.environments": "StepEnvironment",
        "trl.agents.journal": "read_sessions", "trl.agents.export": "preference_rows session_record sft_rows",
        "trl.agents.chains": "Chain chains_of", "trl.agents.sessions": "Budget Session Turn"},
    "trl.experimental.bema_for_ref_model": {"trl.experimental.bema_for_ref_model.callback": "BEMACallback",
        "trl.trainer.dpo_trainer": "DPOTrainer"},
    "trl.experimental.bema_for_ref_model.dpo_trainer": {"trl.trainer.dpo_trainer": "DPOTrainer"},
    "trl.experimental.openenv": {"trl.agents.environments": "StepEnvironment",
        "trl.rollouts.rollout_func": "generate_rollout_completions"},
    "trl.experimental.openenv.utils": {"trl.rollouts.rollout_func": "generate_rollout_completions"},
    "trl.experimental.diffusion_grpo": {"trl.experimental.diffusion_grpo.diffusion_grpo_config": "DiffusionGRPOConfig",
        "trl.experimental.diffusion_grpo.diffusion_grpo_trainer": "DiffusionGRPOTrainer",
        "trl.models.diffusion.flow": "FlowPipeline"},
    "trl.experimental.gfpo": {"trl.experimental.gfpo.gfpo_config": "GFPOConfig",
        "trl.experimental.gfpo.gfpo_trainer": "GFPOTrainer"},
    "trl.experimental.grpo_with_replay_buffer": {
        "trl.experimental.grpo_with_replay_buffer.grpo_with_replay_buffer_config": "GRPOWithReplayBufferConfig",
        "trl.experimental.grpo_with_replay_buffer.grpo_with_replay_buffer_trainer": "GRPOWithReplayBufferTrainer",
        "trl.rollouts.replay": "ReplayBuffer"},
    "trl.experimental.gold": {"trl.experimental.gold.gold_config": "GOLDConfig",
        "trl.experimental.gold.gold_trainer": "GOLDTrainer"},
    "trl.experimental.gold.gold_trainer": {"trl.experimental.gold.methods": "GOLDVLLMSyncCallback ULDLoss "
        "build_teacher_inputs_from_texts print_prompt_completions_sample_uld"},
    "trl.experimental.gspo_token": {"trl.trainer.grpo_trainer": "GRPOTrainer"},
    "trl.experimental.gspo_token.grpo_trainer": {"trl.trainer.grpo_trainer": "GRPOTrainer"},
    "trl.experimental.judges": _JUDGES,
    "trl.experimental.judges.judges": _JUDGE_PATHS,
    "trl.experimental.minillm": {"trl.experimental.minillm.minillm_config": "MiniLLMConfig",
        "trl.experimental.minillm.minillm_trainer": "MiniLLMTrainer"},
    "trl.experimental.merge_model_callback": {"trl.trainer.callbacks.merge_model": "MergeConfig MergeModelCallback "
        "merge_models upload_model_to_hf"},
    "trl.mergekit_utils": {"trl.trainer.callbacks.merge_model": "MergeConfig merge_models upload_model_to_hf"},
    "trl.experimental.winrate_callback": {"trl.trainer.callbacks.win_rate": "WinRateCallback"},
    "trl.experimental.papo": {"trl.experimental.papo.papo_config": "PAPOConfig",
        "trl.experimental.papo.papo_trainer": "PAPOTrainer"},
    "trl.experimental.ppo": {"trl.experimental.ppo.ppo_config": "PPOConfig",
        "trl.experimental.ppo.ppo_trainer": "PPOTrainer"},
    "trl.experimental.ppo.ppo_trainer": {**_DATA_SET_PPO, "trl.reporting.tables": "print_rich_table",
        "trl.tensors.statistics": "masked_mean masked_var masked_whiten"},
    "trl.experimental.sdft": {"trl.experimental.sdft.sdft_config": "SDFTConfig",
        "trl.experimental.sdft.sdft_trainer": "SDFTTrainer"},
    "trl.experimental.sdpo": {"trl.experimental.sdpo.sdpo_config": "SDPOConfig",
        "trl.experimental.sdpo.sdpo_trainer": "SDPOTrainer"},
    "trl.extras": {"trl.rollouts.best_of_n": "BestOfNSampler"},
    "trl.extras.best_of_n_sampler": {"trl.rollouts.best_of_n": "BestOfNSampler"},
    "trl.extras.dataset_formatting": {"trl.legacy.text_data": "FORMAT_MAPPING conversations_formatting_function "
        "get_formatting_func_from_dataset instructions_formatting_function"},
    "trl.extras.profiling": {"trl.reporting.trackers": "profiling_context profiling_decorator"},
    "trl.extras.vllm_client": {"trl.generation.vllm.client": "VLLMClient pil_to_base64"},
    "trl.import_utils": {"trl.options.packages": "LIGER_KERNEL_MIN_VERSION OptionalDependencyNotAvailable "
        "TRLExperimentalWarning is_accelerate_greater_20_0 is_bitsandbytes_available is_deepspeed_available "
        "is_diffusers_available is_fastapi_available is_jmespath_available is_joblib_available "
        "is_liger_kernel_available is_llm_blender_available is_llmblender_available is_math_verify_available "
        "is_mergekit_available is_peft_available is_pydantic_available is_requests_available is_rich_available "
        "is_torch_greater_2_0 is_torchvision_available is_transformers_greater_than is_unsloth_available "
        "is_uvicorn_available is_vllm_ascend_available is_vllm_available is_wandb_available is_weave_available "
        "suppress_experimental_warning suppress_warning"},
    "trl.models": {**_VALUE_HEADS, **_MODEL_SETUP, **_DIFFUSION,
        "trl.models.value_head": f"{_VALUE_HEADS['trl.models.value_head']} SUPPORTED_ARCHITECTURES",
        "trl.models.activation_offloading": "get_act_offloading_ctx_manager",
        "trl.models.geometric_mixture": "GeometricMixtureWrapper", "trl.options.packages": "is_diffusers_available"},
    "trl.models.auxiliary_modules": {"trl.rewards.images": "AestheticScorer MLP aesthetic_scorer"},
    "trl.models.modeling_sd_base": {"trl.models.diffusion.ddim": "DDPOSchedulerOutput scheduler_step",
        "trl.models.diffusion.stable_diffusion": "DDPOPipelineOutput DDPOStableDiffusionPipeline "
        "DefaultDDPOStableDiffusionPipeline pipeline_step pipeline_step_with_grad"},
    "trl.models.sd_utils": {"diffusers.utils.state_dict_utils": "DIFFUSERS_OLD_TO_DIFFUSERS "
        "DIFFUSERS_STATE_DICT_MAPPINGS KEYS_TO_ALWAYS_REPLACE PEFT_TO_DIFFUSERS StateDictType convert_state_dict "
        "convert_state_dict_to_diffusers"},
    "trl.models.modeling_base": {"trl.models.geometric_mixture": "GeometricMixtureWrapper",
        "trl.models.reference_weights": "LAYER_PATTERNS create_reference_model",
        "trl.models.value_wrapper": "PreTrainedModelWrapper"},
    "trl.models.modeling_value_head": {"trl.models.value_head": "AutoModelForCausalLMWithValueHead "
        "AutoModelForSeq2SeqLMWithValueHead ValueHead"},
    "trl.models.utils": {**_MODEL_SETUP, "trl.models.chat_setup": "ChatMlSpecialTokens FORMAT_MAPPING=CHAT_FORMATS "
        "clone_chat_template setup_chat_format", "trl.models.switches": "disable_gradient_checkpointing "
        "enable_gradient_checkpointing", "trl.models.distributed": "add_hooks get_all_parameters iter_params "
        "prepare_deepspeed prepare_fsdp remove_hooks unwrap_model_for_generation",
        "trl.models.peft": "peft_module_casting_to_bf16 prepare_model_for_kbit_training prepare_peft_model",
        "trl.models.value_head": "SUPPORTED_ARCHITECTURES"},
    "trl.rewards": {"trl.rewards.ready_made": "accuracy_reward reasoning_accuracy_reward get_soft_overlong_punishment "
        "think_format_reward", "trl.rewards.functions": "FunctionSource resolve_reward_funcs",
        "trl.rewards.images": "AestheticScorer jpeg_compressibility jpeg_incompressibility",
        "trl.rewards.judge_source": "JudgeSource", "trl.rewards.managed_judge": "ManagedJudge",
        "trl.rewards.models": "ModelSource", "trl.rewards.result": "RewardError RewardInputs RewardResult",
        "trl.rewards.source": "RewardSources"},
    "trl.rewards.accuracy_rewards": {"trl.rewards.ready_made": "accuracy_reward reasoning_accuracy_reward"},
    "trl.rewards.format_rewards": {"trl.rewards.ready_made": "think_format_reward"},
    "trl.rewards.other_rewards": {"trl.rewards.ready_made": "get_soft_overlong_punishment"},
    "trl.scripts": _SCRIPTS,
    "trl.scripts.grpo": {"trl.rewards.functions": "reward_funcs_registry"},
    "trl.scripts.rloo": {"trl.rewards.functions": "reward_funcs_registry"},
    "trl.scripts.vllm_serve": {"trl.generation.vllm.backend": "chunk_list llm_worker sanitize_logprob",
        "trl.generation.vllm.worker": "WeightSyncWorkerExtension", "trl.models.distributed": "get_open_port",
        "trl.scripts.vllm_serve": "ScriptArguments=ServeArguments"},
    "trl.scripts.utils": {**_SCRIPTS, "trl.data.sources": "DatasetConfig DatasetMixtureConfig get_dataset",
        "trl.scripts.env": "get_git_commit_hash"},
    "trl.trainer": {**_TRAINERS, **_JUDGES, **_CALLBACKS, **_MODEL_OPTIONS, "trl.models.peft": "get_peft_config "
        "peft_module_casting_to_bf16", "trl.models.switches": "disable_dropout_in_model empty_cache",
        "trl.collators.completion_only": "DataCollatorForCompletionOnlyLM",
        "trl.legacy.text_data": "ConstantLengthDataset", "trl.objectives.kl": "AdaptiveKLController FixedKLController",
        "trl.options.packages": "is_diffusers_available", "trl.reporting.metrics": "compute_accuracy",
        "trl.tensors.moments": "RunningMoments", "trl.trainer.base_trainer": "BaseTrainer",
        "trl.trainer.preference_trainer": "PreferenceTrainer"},
    "trl.trainer.base": {"trl.trainer.base_trainer": "BaseTrainer"},
    "trl.trainer.bco_trainer": {"trl.models.prompt_density": "CLF_NAME=CLASSIFIER_FILE"},
    "trl.trainer.callbacks": _CALLBACKS,
    "trl.trainer.dpo_trainer": {"trl.collators.preference": "DataCollatorForPreference",
        "trl.models.scoring.encoder_decoder": "shift_tokens_right"},
    "trl.trainer.grpo_trainer": _GRPO_PARTS,
    "trl.trainer.judges": _JUDGE_PATHS,
    "trl.trainer.model_config": {"trl.options.model": "ModelConfig"},
    "trl.trainer.online_dpo_trainer": {"trl.rewards.source": "RewardFunc"},
    "trl.trainer.ppo_trainer": _DATA_SET_PPO,
    "trl.trainer.ppov2_config": {"trl.experimental.ppo.ppo_config": "PPOv2Config=PPOConfig"},
    "trl.trainer.ppov2_trainer": {**_DATA_SET_PPO, "trl.experimental.ppo.ppo_trainer": "PPOv2Trainer=PPOTrainer"},
    "trl.trainer.reward_trainer": {"trl.collators.reward": "DataCollatorForPreference",
        "trl.models.loading": "suppress_from_pretrained_warning"},
    "trl.trainer.rloo_trainer": {"trl.models.scoring.values": "INVALID_LOGPROB", "trl.rewards.source": "RewardFunc"},
    "trl.trainer.sft_trainer": {"trl.data.formats": "TListOrMapping get_dataset_column_names=column_names",
        "trl.models.packed.attention": "FLASH_ATTENTION_VARIANTS",
        "transformers.integrations.neftune": "neftune_post_forward_hook",
        "trl.objectives.language_modelling": "dft_loss"},
    "trl.trainer.training_configs": {"trl.trainer.reward_config": "RewardConfig"},
    "trl.trainer.utils": {"trl.collators.chatml": "DataCollatorForChatML",
        "trl.collators.completion_only": "DataCollatorForCompletionOnlyLM",
        "trl.collators.preference": "DPODataCollatorWithPadding",
        "trl.collators.reward": "RewardDataCollatorWithPadding", "trl.legacy.text_data": "ConstantLengthDataset "
        "add_bos_token_if_needed add_eos_token_if_needed", "trl.data.formats": "TListOrMapping remove_none_values",
        "trl.data.training_templates": "SIMPLE_CHAT_TEMPLATE SIMPLE_SFT_CHAT_TEMPLATE",
        "trl.data.ragged": "truncate_with_protected_tokens",
        "trl.generation.transformers.padded_queries": "batch_generation decode_and_strip_padding forward generate "
        "get_reward", "trl.models.switches": "disable_dropout_in_model empty_cache",
        "transformers.integrations.neftune": "neftune_post_forward_hook",
        "trl.models.distributed": "ensure_master_addr_port prepare_deepspeed=prepare_frozen_deepspeed",
        "trl.models.loading": "create_model_from_path get_config_model_id", "trl.models.peft": "get_kbit_device_map "
        "get_peft_config get_quantization_config peft_module_casting_to_bf16",
        "trl.objectives.diffusion": "PerPromptStatTracker", "trl.objectives.kl": "AdaptiveKLController "
        "FixedKLController", "trl.reporting.metrics": "compute_accuracy",
        "trl.reporting.model_card": "generate_model_card trl_sanitze_kwargs_for_tagging",
        "trl.reporting.tables": "print_prompt_completions_sample print_rich_table",
        "trl.reporting.trackers": "get_comet_experiment_url log_table_to_comet_experiment",
        "trl.rollouts.schedule": "RepeatSampler", "trl.tensors.moments": "RunningMoments get_global_statistics",
        "trl.tensors.padding": "exact_div first_true_indices flush_left flush_right pad pad_to_length "
        "shuffle_sequence_dict split_pixel_values_by_grid split_tensor_dict truncate_response truncate_right "
        "unsplit_pixel_values_by_grid", "trl.tensors.statistics": "cap_exp entropy_from_logits get_exp_cap identity "
        "nanmax nanmin nanstd selective_log_softmax", "trl.trainer.callbacks.checkpoints": "PeftSavingCallback",
        "trl.trainer.ppo_config": "OnPolicyConfig OnlineTrainerState"},
}

# Methods whose path in 0.26 and 1.x holds the classes of trl.trainer.
for _name in (name for name in _METHODS if name != "ppo"):
    _config = {f"trl.trainer.{_name}_config": f"{_METHODS[_name]}Config"}
    _trainer = {f"trl.trainer.{_name}_trainer": f"{_METHODS[_name]}Trainer"}
    NAMES[f"trl.experimental.{_name}"] = {**_config, **_trainer}
    NAMES[f"trl.experimental.{_name}.{_name}_config"] = _config
    NAMES[f"trl.experimental.{_name}.{_name}_trainer"] = {
        **NAMES.get(f"trl.trainer.{_name}_trainer", {}),
        **_trainer,
    }
for _name in ("bco", "kto"):
    NAMES[f"trl.experimental.{_name}.{_name}_trainer"][f"trl.trainer.{_name}_trainer"] += " RUNNING_NAME"
NAMES["trl.experimental.bco.bco_trainer"]["trl.tensors.moments"] = "RunningMoments"
for _name in ("ppo", "ddpo", "alignprop"):
    _known = NAMES.setdefault(f"trl.trainer.{_name}_trainer", {})
    _known["trl.legacy.model_cards"] = f"MODEL_CARD_TEMPLATE={_name.upper()}"

# fmt: on


def places(module: str) -> dict[str, str]:
    """Where each name of an import path lives: `name -> "home:name at home"`."""
    homes = {}
    for home, names in NAMES.get(module, {}).items():
        for entry in names.split():
            name, _, at_home = entry.partition("=")
            homes[name] = f"{home}:{at_home or name}"
    return homes
