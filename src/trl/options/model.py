"""Option groups for the model: what is loaded, which adapters train, how weights are quantised."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from trl.options.checks import check_at_least, check_one_of, json_object, warn_caller
from trl.options.docs import documented
from trl.options.groups import OptionGroup

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")


@dataclass
class ModelInit(OptionGroup):
    """How a trainer loads a model that was given by name or path."""

    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Keyword arguments for from_pretrained, as a dict or JSON object, used when the trainer loads the "
            'model from a name or path, e.g. {"dtype": "bfloat16"}.'
        },
    )

    def check(self) -> None:
        super().check()
        self.model_init_kwargs = json_object("model_init_kwargs", self.model_init_kwargs)


@dataclass
class ModelSource(OptionGroup):
    """Which model a script loads, and in which form."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Directory of a saved model, or its name on the Hugging Face Hub."}
    )
    model_revision: str = field(
        default="main", metadata={"help": "Branch, tag or commit of the model's repository on the Hub."}
    )
    dtype: str | None = field(
        default=None,
        metadata={
            "help": "Number format in which the weights are loaded. None and 'auto': the one they were saved in.",
            "choices": DTYPES,
        },
    )
    trust_remote_code: bool = field(
        default=False,
        metadata={
            "help": "Run Python code that comes with the model's repository. Only for repositories you trust."
        },
    )
    attn_implementation: str | None = field(
        default=None,
        metadata={
            "help": "Name of the attention implementation (sdpa, eager, flash_attention_2, ...). None: the best that "
            "is installed."
        },
    )

    def check(self) -> None:
        super().check()
        check_one_of("dtype", self.dtype, DTYPES, optional=True)


@dataclass
class LoraOptions(OptionGroup):
    """Low-rank adapters (LoRA) trained in place of all weights."""

    use_peft: bool = field(
        default=False,
        metadata={"help": "Train low-rank adapters (LoRA) and leave the model's own weights frozen."},
    )
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapter matrices."})
    lora_alpha: int = field(
        default=32,
        metadata={"help": "Scale of the adapters: their output is multiplied by lora_alpha / lora_r."},
    )
    lora_dropout: float = field(
        default=0.05,
        metadata={"help": "Share of an adapter's inputs that are dropped in training, in [0, 1)."},
    )
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata={
            "help": "Names of the modules that get adapters, or 'all-linear'. None: PEFT's choice for the architecture."
        },
    )
    lora_target_parameters: list[str] | None = field(
        default=None,
        metadata={"help": "Names of parameters that get adapters directly (the expert weights of mixtures)."},
    )
    lora_modules_to_save: list[str] | None = field(
        default=None,
        metadata={
            "help": "Names of modules that are trained whole and saved with the adapter (a value head, ...)."
        },
    )
    lora_task_type: str = field(
        default="CAUSAL_LM", metadata={"help": "PEFT's name for the task; SEQ_CLS for reward models."}
    )
    use_rslora: bool = field(
        default=False, metadata={"help": "Rank-stabilised LoRA: scale by lora_alpha / sqrt(lora_r) instead."}
    )
    use_dora: bool = field(
        default=False,
        metadata={"help": "DoRA: learn the size and the direction of the weight update separately."},
    )

    def check(self) -> None:
        super().check()
        check_at_least("lora_r", self.lora_r, minimum=1, optional=False)
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(
                f"lora_dropout must be in [0, 1), got {self.lora_dropout}. Use 0 for no dropout."
            )
        modules: Any = self.lora_target_modules
        if isinstance(modules, list) and len(modules) == 1 and not modules[0].isidentifier():
            # Not a module's name: the keyword 'all-linear', or a pattern, which PEFT wants as a string.
            self.lora_target_modules = modules[0]
        if not self.use_peft:
            self._warn_of_unused()

    def _warn_of_unused(self) -> None:
        fields = [entry for entry in dataclasses.fields(LoraOptions) if entry.name != "use_peft"]
        unused = [entry.name for entry in fields if getattr(self, entry.name) != entry.default]
        if unused:
            names = ", ".join(unused)
            warn_caller(f"{names} has no effect without use_peft=True: all weights are trained.")


@dataclass
class QuantizationOptions(OptionGroup):
    """Weights loaded in 8 or 4 bits."""

    load_in_8bit: bool = field(
        default=False, metadata={"help": "Load the weights in 8 bits (needs bitsandbytes)."}
    )
    load_in_4bit: bool = field(
        default=False, metadata={"help": "Load the weights in 4 bits (needs bitsandbytes)."}
    )
    bnb_4bit_quant_type: str = field(
        default="nf4",
        metadata={"help": "Format of 4-bit weights: normal floats or floats.", "choices": ("nf4", "fp4")},
    )
    use_bnb_nested_quant: bool = field(
        default=False,
        metadata={"help": "Quantise the scales of 4-bit weights as well (0.4 bits less per weight)."},
    )
    bnb_4bit_quant_storage: str | None = field(
        default=None,
        metadata={
            "help": "Number format that 4-bit weights are packed into. FSDP needs that of the other weights. None: "
            "that of the computation."
        },
    )

    def check(self) -> None:
        super().check()
        check_one_of("bnb_4bit_quant_type", self.bnb_4bit_quant_type, ("nf4", "fp4"))
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError(
                "load_in_8bit and load_in_4bit cannot both be True: weights have one format. Set one of them."
            )


@documented
@dataclass
class ModelConfig(QuantizationOptions, LoraOptions, ModelSource):
    """The model of a script: what is loaded, with which adapters, in how many bits.

    Example:
        >>> from trl import ModelConfig
        >>> model_args = ModelConfig("Qwen/Qwen3-0.6B", use_peft=True, lora_target_modules=["all-linear"])
        >>> model_args.lora_target_modules
        'all-linear'
    """

    torch_dtype: str | None = field(
        default=None, metadata={"help": "Deprecated name of dtype.", "choices": DTYPES}
    )

    def __post_init__(self) -> None:
        self._move_torch_dtype()
        self.settle()

    def _move_torch_dtype(self) -> None:
        if self.torch_dtype is None:
            return
        if self.dtype is not None and self.dtype != self.torch_dtype:
            raise ValueError(
                f"dtype={self.dtype!r} and torch_dtype={self.torch_dtype!r} disagree. torch_dtype is the old name of "
                "dtype: pass dtype only."
            )
        warn_caller("`torch_dtype` is now called `dtype`: pass dtype instead.", FutureWarning)
        self.dtype, self.torch_dtype = self.torch_dtype, None
