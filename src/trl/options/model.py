"""The model of a script: what is loaded, which adapters train, how weights are quantised."""

from dataclasses import dataclass
from typing import Any

from trl.options.groups import OptionGroup, documented, moved, option

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")


@dataclass
class ModelSource(OptionGroup):
    """Which model a script loads, and in which form."""

    model_name_or_path: str | None = option(None, "Folder of a saved model, or its name on the Hub.")
    model_revision: str = option("main", "Branch, tag or commit of the model's repository on the Hub.")
    dtype: str | None = option(None, "Dtype of weights. None: float32 to train, else the files'.", choices=DTYPES)
    trust_remote_code: bool = option(False, "Run Python code from the model's repository. Only if trusted.")
    attn_implementation: str | None = option(None, "sdpa, eager, flash_attention_2, ... None: the best one.")


@dataclass
class LoraOptions(OptionGroup):
    """Low-rank adapters (LoRA) trained in place of all weights."""

    use_peft: bool = option(False, "Train low-rank adapters (LoRA) and freeze the model's own weights.")
    lora_r: int = option(16, "Rank of the adapter matrices.", ">= 1", needs="use_peft")
    lora_alpha: int = option(32, "Scale: outputs are multiplied by lora_alpha / lora_r.", needs="use_peft")
    lora_dropout: float = option(0.05, "Dropout of an adapter's inputs.", "[0, 1)", needs="use_peft")
    lora_target_modules: list[str] | None = option(None, "Adapted, or all-linear.", needs="use_peft")
    lora_target_parameters: list[str] | None = option(None, "Adapted parameters (experts).", needs="use_peft")
    lora_modules_to_save: list[str] | None = option(None, "Modules trained whole.", needs="use_peft")
    lora_task_type: str = option("CAUSAL_LM", "PEFT's; SEQ_CLS for reward models.", needs="use_peft")
    use_rslora: bool = option(False, "Scale by lora_alpha / sqrt(lora_r) instead.", needs="use_peft")
    use_dora: bool = option(False, "Learn size and direction of updates apart.", needs="use_peft")

    def check(self) -> None:
        super().check()
        modules: Any = self.lora_target_modules
        if isinstance(modules, list) and len(modules) == 1 and not modules[0].isidentifier():
            # Not a module's name: the keyword 'all-linear', or a pattern, which PEFT wants as a string.
            self.lora_target_modules = modules[0]


@dataclass
class QuantizationOptions(OptionGroup):
    """Weights loaded in 8 or 4 bits."""

    load_in_8bit: bool = option(False, "Load the weights in 8 bits (needs bitsandbytes).")
    load_in_4bit: bool = option(False, "Load the weights in 4 bits (needs bitsandbytes).")
    bnb_4bit_quant_type: str = option("nf4", "Format of 4-bit weights.", choices=("nf4", "fp4"))
    use_bnb_nested_quant: bool = option(False, "Quantise the scales of 4-bit weights as well.")
    bnb_4bit_quant_storage: str | None = option(None, "Dtype that stores 4-bit weights; FSDP needs dtype's.")

    def check(self) -> None:
        super().check()
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit and load_in_4bit cannot both be True. Set one of them.")


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

    torch_dtype: str | None = moved(to="dtype", choices=DTYPES)
