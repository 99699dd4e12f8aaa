"""A run as it is planned: its settings, its method, and its model as its trainer would load it, from a config."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple

import torch
from accelerate.utils import convert_file_size_to_int
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    training_args,
)

from trl.cli.launch import make_plan
from trl.experimental.ppo.ppo_config import PPOConfig
from trl.experimental.ppo.ppo_method import PPOMethod
from trl.methods.online import OnlineMethod
from trl.models.loading import load_config
from trl.models.parts import causal_core
from trl.models.peft import get_peft_config, peft_module_casting_to_bf16, prepare_peft_model, resolve_dtype
from trl.models.residuals import to_bfloat16
from trl.models.scoring.values import PolicyAndValue
from trl.models.setup import REWARD_MODEL, ClassifierKind
from trl.models.switches import disable_dropout_in_model, holding
from trl.options import training
from trl.options.model import ModelConfig
from trl.scripts.arguments import ScriptArguments
from trl.scripts.config_file import ConfigFile, read_config, take_config_option
from trl.scripts.parser import TrlParser
from trl.scripts.planning import METHODS
from trl.scripts.planning.live_bytes import Bytes
from trl.scripts.planning.state import Sharding, sharding_of
from trl.scripts.training import COMMANDS, method_parser

_SAME_MICRO_BATCHES = {"optim", "precompute_ref_log_probs"}  # settings that do not change them
_BLOCK = 64  # weights of one scale in four bits
_LENGTH = 1024  # of a row without a limit
_UNPLANNED = ("activation_offloading", "fp16", "load_in_8bit", "teacher_model_server_url")
_MODELS = {"ref_model_name_or_path": "reference", "teacher_model_name_or_path": "teacher",
    "reward_model_name_or_path": "reward model", "reward_model_path": "reward model"}  # fmt: skip


class Lengths(NamedTuple):
    """Tokens of a prompt and of a completion, of a row together."""

    prompt: int
    completion: int

    @property
    def row(self) -> int:
        """Tokens of prompt and completion."""
        return self.prompt + self.completion


@dataclass(frozen=True)
class Run:
    """What decides the memory of a run."""

    method: str
    config: PretrainedConfig
    args: Any
    model_args: ModelConfig
    sharding: Sharding
    frozen: Mapping[str, PretrainedConfig] = field(default_factory=dict)  # other models, by what they are
    memory: float | None = None  # of a device
    phases: dict[bool, dict[str, Bytes]] = field(default_factory=dict)
    """Of a micro-batch, by whether it is `half`, once they are measured."""

    @cached_property
    def loss(self) -> Any:
        """The method's mathematics with these settings."""
        if self.method == "ppo":
            return PPOMethod(self.args, None)
        module = import_module(f"trl.methods.{self.method.replace('-', '_')}")
        kind = getattr(module, f"{COMMANDS[self.method].prefix}Method")
        settings = self.args.loss_type if self.method == "sft" else self.args
        method = kind(settings, **({"density": None} if self.method == "bco" else {}))
        method.epoch = lambda: 0.0  # online DPO's
        return method

    @property
    def samples(self) -> bool:
        """Whether it learns from the policy's completions alone."""
        return isinstance(self.loss, OnlineMethod)

    @property
    def classifier(self) -> ClassifierKind | None:
        """The kind of the model, where it is a classifier."""
        return REWARD_MODEL if self.method == "reward" else None

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        return self.args.per_device_train_batch_size

    @cached_property
    def lengths(self) -> Lengths:
        """The greatest lengths that the options allow; half of a row is prompt where they leave it open."""
        prompt, completion = (getattr(self.args, f"max_{part}_length", None) for part in ("prompt", "completion"))
        context = getattr(self.config, "max_position_embeddings", None) or _LENGTH
        if self.samples:
            completion = completion or getattr(self.args, "response_length", _LENGTH)
            return Lengths(prompt or min(completion, max(1, context - completion)), completion)
        row = getattr(self.args, "max_length", None) or min(_LENGTH, context)
        longest = max(1, row - getattr(self.args, "max_new_tokens", row // 2))
        prompt = min(prompt or longest, longest)
        return Lengths(prompt, max(1, row - prompt))

    @property
    def vllm(self) -> float:
        """The share of a device's memory that vLLM takes in the same process."""
        colocated = getattr(self.args, "use_vllm", False) and self.args.vllm_mode == "colocate"
        return self.args.vllm_gpu_memory_utilization if colocated else 0.0

    def changed(self, **settings: object) -> "Run":
        """The run with other settings, of the model or of training, which are not checked."""
        args, model_args = copy.copy(self.args), copy.copy(self.model_args)
        for name, value in settings.items():
            setattr(model_args if hasattr(model_args, name) else args, name, value)
        return replace(
            self, args=args, model_args=model_args, phases=self.phases if settings.keys() <= _SAME_MICRO_BATCHES else {}
        )

    def build(self, config: PretrainedConfig) -> nn.Module:
        """The policy, with PPO's value model, or classifier, with a config, on the meta device."""
        args, adapter = self.args, get_peft_config(self.model_args)
        model: Any = meta_model(config, weights_dtype(config, args, self.model_args), self.classifier)
        if adapter is not None:
            adapter.task_type = self.classifier.task_type if self.classifier else adapter.task_type
            model = prepare_peft_model(model, adapter, args)
        if self.model_args.load_in_4bit:  # matrices, which are computed with in bfloat16, stay
            for parameter in {*causal_core(model).parameters()}.difference(matrices_of(causal_core(model))):
                parameter.data = parameter.data.float()
            if args.bf16:
                peft_module_casting_to_bf16(model)
        parts = [model]
        if self.method == "ppo":  # the value model begins as a copy of the policy
            dtype = torch.promote_types(causal_core(model).dtype, torch.float32)
            parts.append(meta_model(config, dtype, REWARD_MODEL))
            model = PolicyAndValue(*parts)
        for part in parts if getattr(args, "weights", None) is not None else ():
            to_bfloat16(part)
        if getattr(args, "disable_dropout", False):
            disable_dropout_in_model(model)
        return model

    @cached_property
    def model(self) -> nn.Module:
        """The policy without numbers."""
        return self.build(self.config)

    @cached_property
    def kept(self) -> dict[Tensor, float]:
        """The bytes of each weight as it is kept: in 4 bits with a scale of each block, which may be nested."""
        sizes: dict[Tensor, float] = {weight: float(weight.nbytes) for weight in self.model.parameters()}
        scale = 1 + 4 / 256 if self.model_args.use_bnb_nested_quant else 4  # in float32; nested ones in 8 bits
        for matrix in matrices_of(core_of(self.model)) if self.model_args.load_in_4bit else ():
            sizes[matrix] = matrix.numel() * (0.5 + scale / _BLOCK)
        return sizes

    @property
    def trained(self) -> list[Tensor]:
        """The weights with a gradient."""
        return [weight for weight in self.kept if weight.requires_grad]

    def computed(self, weights: Iterable[Tensor]) -> float:
        """The bytes of weights as they are computed with; in 4 bits one matrix at a time is dense."""
        return sum(min(self.kept[x], 2.0 * x.numel()) if self.sharding.half else self.kept[x] for x in weights)


def run_for(
    method: str, words: list[str], gpus: int, memory: str | None = None, config: PretrainedConfig | None = None,
    settings: Mapping[str, object] | None = None,
) -> Run:  # fmt: skip
    """What is planned, of the words of a command line; `config` is that of its model if that is at hand.

    `settings` replace those of the file that the words name.
    """
    method = method.replace("_", "-")
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}. `trl plan` takes it first.")
    if gpus < 1:
        raise ValueError(f"gpus must be at least 1, got {gpus}.")
    of_ppo: Any = (ScriptArguments, PPOConfig, ModelConfig)
    parser = TrlParser(of_ppo, prog="trl plan") if method == "ppo" else method_parser(method, "trl plan")
    path, words = take_config_option(words)
    file = ConfigFile("options", {}, {}, {}) if path is None else read_config(path)
    split = make_plan(parser, words, replace(file, values={**file.values, **(settings or {})}))
    has_bf16 = holding(training_args, "is_torch_bf16_gpu_available", lambda: True)  # like the GPU that is planned
    with has_bf16, holding(training, "default_bf16", lambda *, use_cpu, fp16: not (use_cpu or fp16)):
        script_args, args, model_args, *_ = parser.parse_with(split.script, split.config)
    options = {**vars(model_args), **vars(script_args), **vars(args)}
    if refused := [name for name in _UNPLANNED if options.get(name)]:
        raise ValueError(f"{refused[0]} is not planned. Leave it out.")
    if config is None and model_args.model_name_or_path is None:
        raise ValueError("model_name_or_path is missing. Give the folder of a model, or its name on the Hub.")
    source = {"revision": model_args.model_revision, "trust_remote_code": model_args.trust_remote_code}
    config = config or load_config(str(model_args.model_name_or_path), source)
    if (kind := type(config.get_text_config())) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        raise ValueError(f"{kind.__name__} is of no causal model of transformers, and not planned. Give a text model.")
    frozen = {
        what: load_config(options[name], source)
        for name, what in _MODELS.items()
        if options.get(name) not in (None, getattr(type(args), name, None))  # RLOO names a model that it does not load
    }
    if method in ("gkd", "distillation") and not ("teacher" in frozen or model_args.use_peft):
        raise ValueError("teacher_model_name_or_path is missing. Give one, or set use_peft: its base teaches then.")
    if model_args.load_in_4bit and not model_args.use_peft:
        raise ValueError("load_in_4bit needs an adapter, as quantised weights are not trained. Set use_peft.")
    sharding = sharding_of(split.launch.get("config_file"), gpus, half=bool(args.bf16))
    try:
        size = None if memory is None else float(convert_file_size_to_int(str(memory).upper()))
        if size == 0:
            raise ValueError
    except ValueError:
        raise ValueError(f"memory must be a number with a unit (80GB, 24GiB), got {memory!r}.") from None
    run = Run(method, config.get_text_config(), args, model_args, sharding, frozen, size)
    if run.vllm and size is None:
        raise ValueError(f"memory is missing: vLLM takes {run.vllm:.0%} of the GPU. Give its size, such as 80GB.")
    return run


def meta_model(
    config: PretrainedConfig, dtype: torch.dtype, classifier: ClassifierKind | None = None
) -> PreTrainedModel:
    """A model with this config on the meta device."""
    kind, config = AutoModelForCausalLM, copy.deepcopy(config)  # into which the dtype is written
    if classifier is not None:
        kind, config.num_labels = classifier.auto, classifier.labels
    with torch.device("meta"):
        return kind.from_config(config, dtype=dtype)


def core_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model of a policy, which may stand beside a value model."""
    return causal_core(getattr(model, "policy", model))


def saved_dtype(config: PretrainedConfig) -> torch.dtype:
    """The dtype that a model beside the policy is loaded in."""
    return config.dtype or config.get_text_config().dtype or torch.float32  # type: ignore[return-value]


def weights_dtype(config: PretrainedConfig, args: Any, model_args: ModelConfig) -> torch.dtype:
    """The dtype that a trainer loads the model in."""
    saved, wanted = saved_dtype(config), resolve_dtype(model_args.dtype)
    if model_args.load_in_4bit:
        return torch.bfloat16
    if isinstance(wanted, torch.dtype):
        return wanted
    trains_all = not model_args.use_peft and model_args.dtype is None
    return torch.promote_types(saved, torch.float32) if trains_all else saved


def matrices_of(core: Any) -> list[Tensor]:
    """The weights that quantisation shrinks: frozen matrices of linear layers, but not the head's."""
    head, linear = core.get_output_embeddings(), [x for x in core.modules() if isinstance(x, nn.Linear)]
    return [x.weight for x in linear if x is not head and not x.weight.requires_grad]
