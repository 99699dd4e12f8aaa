"""Option groups of generation for training: lengths, how tokens are drawn, and which engine draws them."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from trl.options.checks import check_at_least, check_one_of, json_object, warn_caller
from trl.options.groups import OptionGroup, changed_default
from trl.options.rollout import FixedResponses

VLLMMode = Literal["server", "colocate"]
VLLMModelImpl = Literal["vllm", "transformers"]


@dataclass
class Completions(OptionGroup):
    """How long prompts and completions are, and how completions are drawn."""

    max_prompt_length: int | None = field(
        default=None,
        metadata={"help": "Longest prompt, in tokens: of a longer one the end is kept. None: no limit."},
    )
    max_completion_length: int | None = field(
        default=256,
        metadata={
            "help": "Longest completion that is generated, in tokens. None: as generation_kwargs or the model's window says."
        },
    )
    temperature: float = changed_default(FixedResponses, "temperature", 1.0)
    top_p: float = field(
        default=1.0,
        metadata={
            "help": "Draw from the likeliest tokens that make up this probability, in (0, 1]. 1: from all."
        },
    )
    top_k: int | None = field(
        default=None,
        metadata={"help": "Draw from this many of the likeliest tokens. None, 0 or -1: from all."},
    )
    min_p: float | None = field(
        default=None,
        metadata={
            "help": "Draw from tokens that are at least this share as likely as the likeliest, in [0, 1]. None: from all."
        },
    )
    repetition_penalty: float = field(
        default=1.0,
        metadata={
            "help": "Divides the scores of tokens that prompt or completion have already, > 0. 1: none."
        },
    )
    generation_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Further settings of generation by their names in transformers' GenerationConfig, as a dict or JSON "
            "object; they go before the fields here."
        },
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Keyword arguments of the chat template, as a dict or JSON object."},
    )

    def check(self) -> None:
        super().check()
        self.generation_kwargs = json_object("generation_kwargs", self.generation_kwargs)
        self.chat_template_kwargs = json_object("chat_template_kwargs", self.chat_template_kwargs)
        check_at_least("max_prompt_length", self.max_prompt_length, minimum=1, hint="Use None for no limit.")
        check_at_least("max_completion_length", self.max_completion_length, minimum=1)
        self.top_k = 0 if self.top_k == -1 else self.top_k  # vLLM's "off"
        check_at_least("top_k", self.top_k, minimum=0)
        self._check_numbers()

    def _check_numbers(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature must be > 0, got {self.temperature}. A policy that is trained must sample; use a small one "
                "for nearly greedy completions."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p must be in (0, 1], got {self.top_p}. Use 1.0 to draw from the whole distribution."
            )
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(
                f"min_p must be in [0, 1] or None, got {self.min_p}. Use None to draw from the whole distribution."
            )
        if not self.repetition_penalty > 0:
            raise ValueError(
                f"repetition_penalty must be > 0, got {self.repetition_penalty}. Use 1.0 for none."
            )


@dataclass
class TransformersGeneration(OptionGroup):
    """Switches of the reference's generation with transformers that have no work to do here."""

    use_transformers_paged: bool = field(
        default=False,
        metadata={"help": "Deprecated: the engine keeps no padded cache, so there is nothing to page."},
    )
    cache_implementation: str | None = field(
        default=None,
        metadata={"help": "Deprecated: the engine has a cache of its own."},
    )

    def check(self) -> None:
        super().check()
        for name in ("use_transformers_paged", "cache_implementation"):
            if getattr(self, name):
                warn_caller(
                    f"{name}={getattr(self, name)!r} has no effect: the engine has a cache of its own. Leave it out.",
                    FutureWarning,
                )


@dataclass
class VLLM(OptionGroup):
    """Generation with vLLM."""

    use_vllm: bool = field(
        default=False,
        metadata={
            "help": "Generate with vLLM instead of the model that is trained: by default with a server that `trl vllm-serve` "
            "started."
        },
    )
    vllm_mode: VLLMMode = field(
        default="server",
        metadata={
            "help": "Where vLLM runs: 'server' (a process of its own, which `trl vllm-serve` starts), or 'colocate' (in the "
            "processes that train, on their devices; needs the extra 'vllm')."
        },
    )
    vllm_model_impl: VLLMModelImpl = field(
        default="vllm",
        metadata={"help": "With 'colocate', whose code of the model vLLM runs: 'vllm' or 'transformers'."},
    )
    vllm_enable_sleep_mode: bool = field(
        default=False,
        metadata={"help": "With 'colocate', give vLLM's memory back while the policy is updated."},
    )
    vllm_guided_decoding_regex: str | None = field(
        default=None, metadata={"help": "Regular expression that every completion must match. None: none."}
    )
    vllm_server_base_url: str | None = field(
        default=None,
        metadata={
            "help": "Address of the server, such as http://localhost:8000. None: made of vllm_server_host and "
            "vllm_server_port."
        },
    )
    vllm_server_host: str = field(
        default="0.0.0.0", metadata={"help": "Host of the server. 0.0.0.0: this machine."}
    )
    vllm_server_port: int = field(default=8000, metadata={"help": "Port of the server."})
    vllm_server_timeout: float = field(
        default=240.0,
        metadata={
            "help": "Seconds to wait for the server to answer, at the start and where it is started anew amid a run, > 0."
        },
    )
    vllm_group_port: int = field(
        default=51216,
        metadata={
            "help": "Port of the server's machine over which weights are arranged to be sent; each server needs one of its own."
        },
    )
    vllm_gpu_memory_utilization: float = field(
        default=0.3,
        metadata={"help": "With 'colocate', the share of each device's memory that vLLM takes, in (0, 1]."},
    )
    vllm_tensor_parallel_size: int = field(
        default=1,
        metadata={"help": "With 'colocate', number of devices over which a copy of the model is split."},
    )

    def check(self) -> None:
        super().check()
        check_one_of("vllm_mode", self.vllm_mode, get_args(VLLMMode))
        if self.vllm_guided_decoding_regex is not None and not self.use_vllm:
            warn_caller(
                f"vllm_guided_decoding_regex={self.vllm_guided_decoding_regex!r} has no effect with use_vllm=False: completions take "
                "any form. Set use_vllm=True, or leave it out."
            )
        check_one_of("vllm_model_impl", self.vllm_model_impl, get_args(VLLMModelImpl))
        check_at_least("vllm_tensor_parallel_size", self.vllm_tensor_parallel_size, minimum=1, optional=False)
        if not 0 < self.vllm_gpu_memory_utilization <= 1:
            raise ValueError(
                f"vllm_gpu_memory_utilization must be in (0, 1], got {self.vllm_gpu_memory_utilization}. It is a share of "
                "the device's memory; the policy needs the rest."
            )
        if not self.vllm_server_timeout > 0:
            raise ValueError(
                f"vllm_server_timeout must be > 0 seconds, got {self.vllm_server_timeout}. The default is 240."
            )


@dataclass
class CompletionLogs(OptionGroup):
    """Completions in the logs."""

    log_completions: bool = field(
        default=False,
        metadata={
            "help": "Every logging_steps steps, show completions with their rewards as a table and send it to the trackers."
        },
    )
    num_completions_to_print: int | None = field(
        default=None, metadata={"help": "How many completions the printed table shows. None: all."}
    )
    log_unique_prompts: bool = field(
        default=False,
        metadata={"help": "Send one completion of each prompt to the trackers instead of all."},
    )
    wandb_log_unique_prompts: bool | None = field(
        default=None,
        metadata={"help": "Deprecated: now log_unique_prompts.", "nargs": "?", "const": True},
    )

    def check(self) -> None:
        super().check()
        check_at_least("num_completions_to_print", self.num_completions_to_print, minimum=1)
        if self.wandb_log_unique_prompts is not None:
            warn_caller(
                f"wandb_log_unique_prompts={self.wandb_log_unique_prompts} is the older name of log_unique_prompts. Use that.",
                FutureWarning,
            )
            self.log_unique_prompts, self.wandb_log_unique_prompts = self.wandb_log_unique_prompts, None
        for name in ("log_unique_prompts", "num_completions_to_print"):
            if getattr(self, name) and not self.log_completions:
                warn_caller(
                    f"{name}={getattr(self, name)} has no effect with log_completions=False. Set log_completions=True, or leave it out."
                )
