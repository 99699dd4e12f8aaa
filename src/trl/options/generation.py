"""Option group of generation for training: lengths, how tokens are drawn, the engine, tools and the logs."""

from dataclasses import dataclass
from typing import Literal

from trl.options.checks import JSONDict
from trl.options.groups import OptionGroup, moved, option
from trl.options.shared import shared

VLLMMode = Literal["server", "colocate", "async_server"]
VLLMModelImpl = Literal["vllm", "transformers"]
AgentSampling = Literal["own", "agent", "strict"]
AGENT_SETTINGS = (
    "agent_sampling", "agent_host", "agent_concurrency", "agent_deadline", "agent_max_turns", "agent_max_tokens",
    "agent_keep_sessions",
)  # fmt: skip
TOOL_SETTINGS = ("max_tool_calling_iterations", "tool_deadline")


@dataclass
class Completions(OptionGroup):
    """How completions are drawn, and by which engine."""

    max_completion_length: int | None = shared(
        "max_completion_length", 256, help="Longest completion, in tokens. None: the model's context length."
    )
    temperature: float = shared("temperature")
    top_p: float = option(1.0, "Draw from the fewest likeliest tokens of this total probability.", "(0, 1]")
    top_k: int | None = option(None, "Draw from this many likeliest tokens. None, 0 or -1: all.", ">= 0")
    min_p: float | None = option(None, "Least probability of a token, relative to the likeliest.", "[0, 1]")
    repetition_penalty: float = option(1.0, "Divides the scores of tokens that were there before.", "> 0")
    generation_kwargs: JSONDict = option(None, "Fields of GenerationConfig, or JSON.")
    use_transformers_paged: bool = moved("the engine has no padded cache.", default=False)
    use_vllm: bool = option(False, "Generate with vLLM instead of the trained model.")
    vllm_mode: VLLMMode = option("server", "Where vLLM runs: 'server' (`trl vllm-serve`) or 'colocate'.")
    vllm_model_impl: VLLMModelImpl = option("vllm", "With 'colocate', whose code of the model vLLM runs.")
    vllm_enable_sleep_mode: bool = option(False, "With 'colocate', free vLLM's memory during updates.")
    vllm_guided_decoding_regex: str | None = option(None, "Regex of all completions.", needs="use_vllm")
    vllm_server_base_url: str | None = option(None, "Address of the server. None: that of host and port.")
    vllm_server_host: str = option("0.0.0.0", "Host of the server. 0.0.0.0: this machine.")
    vllm_server_port: int = option(8000, "Port of the server.")
    vllm_server_timeout: float = option(240.0, "Seconds to wait for the server to start.", "(0, inf]")
    vllm_group_port: int = option(51216, "Port for the transfer of weights; each server needs its own.")
    vllm_gpu_memory_utilization: float = option(0.3, "With 'colocate', its share of the memory.", "(0, 1]")
    vllm_tensor_parallel_size: int = option(1, "With 'colocate', devices per copy of the model.", ">= 1")
    ds3_gather_for_generation: bool = shared("ds3_gather_for_generation")
    log_completions: bool = option(False, "Every logging_steps, print and track a table of completions.")
    num_completions_to_print: int | None = option(None, "Of the table.", ">= 1", needs="log_completions")

    def check(self) -> None:
        super().check()
        self.top_k = 0 if self.top_k == -1 else self.top_k  # vLLM's "off"
        if self.vllm_mode == "async_server":  # the name of a fork for a server that agents use
            self.vllm_mode = "server"


@dataclass
class Generation(Completions):
    """How completions of prompts are generated in training: lengths, templates, tools and logs."""

    max_prompt_length: int | None = shared(
        "max_prompt_length", None, help="Longest prompt, in tokens; longer ones keep their end. None: no limit."
    )
    chat_template_kwargs: JSONDict = option(None, "Chat template's arguments.")
    cache_implementation: str | None = moved("the engine has a cache of its own.")
    log_unique_prompts: bool = option(False, "Track one completion per prompt.", needs="log_completions")
    wandb_log_unique_prompts: bool | None = moved(to="log_unique_prompts", flag=True)
    max_tool_calling_iterations: int | None = option(None, "Rounds of tool calls. None: no limit.", ">= 1")
    tool_deadline: float | None = option(60.0, "Seconds until a tool call fails. None: never.", "(0, inf]")
    agent_sampling: AgentSampling = option(
        "own", "Temperature, top_p, top_k, min_p that agents send: ignored ('own'), taken ('agent'), or errors."
    )
    agent_host: str = option("127.0.0.1", "Where the endpoint of agents listens. 0.0.0.0: all addresses.")
    agent_concurrency: int = option(64, "Sessions of agents that run at once.", ">= 1")
    agent_deadline: float | None = option(None, "Seconds until a session fails. None: never.", "(0, inf]")
    agent_max_turns: int | None = option(None, "Completions in a session. None: no limit.", ">= 1")
    agent_max_tokens: int | None = option(None, "Sampled tokens in a session. None: no limit.", ">= 1")
    agent_keep_sessions: bool = option(False, "Keep all sessions in output_dir/sessions, for export.")
