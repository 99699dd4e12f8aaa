"""Training with the real `trl vllm-serve`, where vLLM is installed (`make test-vllm`)."""

import copy
import signal
from importlib.util import find_spec

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaForCausalLM

from tests.agents.tool_words import TOOLS, call_tokenizer
from tests.generation.real_server import RealServer
from tests.generation.test_vllm_engine import ran
from tests.generation.vllm_runs import model
from tests.ports import free_port
from tests.trainer.grpo_agent_runs import ROWS, tool_agent
from tests.trainer.grpo_runs import TRAINERS
from tests.trainer.grpo_tool_runs import conversations, many_tools
from trl.generation.engine import Sampling
from trl.generation.transformers.engine import TransformersEngine
from trl.generation.vllm.client import VLLMClient

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is an extra: `make test-vllm` installs it apart"),
    pytest.mark.slow,
]
SETTINGS = {
    "use_vllm": True, "vllm_server_timeout": 60.0, "per_device_train_batch_size": 16, "num_generations": 8, "logging_steps": 1,
    "max_completion_length": 6, "max_steps": 6, "learning_rate": 0.004, "report_to": "none", "use_cpu": True, "seed": 5,
    "save_strategy": "no", "disable_tqdm": True, "beta": 0.0, "lr_scheduler_type": "constant", "bf16": False,
    "temperature": 0.8,
}  # fmt: skip
GREEDY = Sampling(max_new_tokens=8, do_sample=False, stop_token_ids=())
KINDS = {
    "grpo": {"steps_per_generation": 2, "max_steps": 24},
    "rloo": {"method": "rloo", "steps_per_generation": 2},
    "lora": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)},
    "tools": {"tools": TOOLS, "max_completion_length": 24, "max_tool_calling_iterations": 2, "max_steps": 3},
    "agents": {"agent": tool_agent, "max_completion_length": 10, "max_steps": 3},
    "online_dpo": {"method": "online_dpo", "beta": 0.1},
    "distillation": {"method": "distillation", "beta": 1.0},
}
UNCORRECTED = ("rloo", "online_dpo", "distillation")


@pytest.fixture(scope="module")
def policy():
    """A model with tied embeddings, whose choices are not nearly ties."""
    config, words = model().config, call_tokenizer()
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    made = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3)
    made.generation_config.eos_token_id = words.convert_tokens_to_ids(["</s>", "yes", "no", "hi", "?", "3"])
    return made


@pytest.fixture(scope="module")
def server(policy, tmp_path_factory):
    folder, cache = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("cache")
    policy.save_pretrained(folder)
    call_tokenizer().save_pretrained(folder)
    found = RealServer(folder, cache)
    try:
        found.wait()
        yield found
        found.stop(signal.SIGTERM)
    finally:
        found.kill()


@pytest.fixture(autouse=True)
def token(monkeypatch, server):
    monkeypatch.setenv("XDG_CACHE_HOME", str(server.cache))  # where the server left its token
    monkeypatch.delenv("TRL_VLLM_SERVER_TOKEN", raising=False)


def even(completion_ids, **_):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


@pytest.mark.parametrize("kind", KINDS)
def test_training_with_a_server(kind, policy, server, tmp_path):
    """The sampler is the policy, up to rounding: weights arrive before each rollout, adapters added."""
    given = {**SETTINGS, **KINDS[kind]}
    config, trainer = TRAINERS[given.pop("method", "grpo")]
    parts = {name: given.pop(name) for name in ("peft_config", "tools", "agent") if name in given}
    where = {"vllm_server_port": server.port, "vllm_group_port": free_port()}
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    rows = conversations() if kind == "tools" else Dataset.from_dict({"input_ids": prompts})
    if kind == "agents":
        rows, parts["reward_funcs"] = ROWS, None
    elif kind == "distillation":
        parts["teacher_model"] = model(1)
        del given["num_generations"]
    else:
        parts["reward_funcs"] = many_tools if kind == "tools" else even
    made = trainer(
        copy.deepcopy(policy), args=config(str(tmp_path), **where, **given), train_dataset=rows,
        processing_class=call_tokenizer(), **parts,
    )  # fmt: skip
    made.train()
    logs = [entry for entry in made.state.log_history if "completions/mean_length" in entry]  # of each rollout
    assert len(logs) >= 3
    if kind in UNCORRECTED:  # compare with what the policy says itself
        columns = made._rollout_batch.per_token
        if "old_logps" in columns:
            assert float((columns["old_logps"] - columns["sampling_logps"]).abs().max()) < 1e-3
    else:
        assert all(abs(each["sampling/importance_sampling_ratio/mean"] - 1) < 1e-3 for each in logs)
        assert max(each["sampling/sampling_logp_difference/max"] for each in logs) < 1e-3
    if kind == "grpo":
        rewards = [entry["reward"] for entry in logs]
        assert rewards[0] < 0.7 and min(rewards[-3:]) > 0.9
    if kind == "agents":
        assert all(entry["agent/turns"] == 2 and entry["agent/failures/raised"] == 0 for entry in logs)
    if kind == "tools":
        assert max(entry["tools/call_frequency"] for entry in logs) > 0
    made.engine.sync_weights(made.model, -1)
    found = made.engine.generate(prompts, GREEDY)
    own = TransformersEngine(made.model).generate(prompts, GREEDY)
    assert [one.ids for one in found] == [one.ids for one in own]
    assert max(float((one.logps - other.logps).abs().max()) for one, other in zip(found, own, strict=True)) < 1e-4
    made.engine.close()


def test_two_processes_with_agents_share_a_server(server, tmp_path):
    """Requests of 16 sessions, 8 of each process: the policy's own tokens, before and after its weights change."""
    where = {"SERVER": f"http://127.0.0.1:{server.port}", "GROUP_PORT": str(free_port())}
    found = ran("sharing", tmp_path, processes=2, **where)
    assert [len(each["ids"]) for each in found] == [18, 18]
    for each in found:
        assert each["ids"] == each["expected"] and max(each["gaps"]) < 1e-4
        assert each["ids"][:9] != each["ids"][9:]


def test_a_loop_of_ones_own(policy, server):
    """The client as the documents show it: weights sent, completions asked for as text, ids and messages."""
    client = VLLMClient(server_port=server.port, group_port=free_port())
    client.init_communicator("cpu")
    with torch.no_grad():
        moved = copy.deepcopy(policy)
        moved.model.norm.weight.mul_(-1)
    prompts = [[5, 6, 7], [8, 9]]
    seen = []
    for each in (policy, moved):
        client.update_model_params(each)
        greedy = {"temperature": 0.0, "max_tokens": 8, "generation_kwargs": {"ignore_eos": True}}
        found = client.generate(prompts, n=1, **greedy)
        assert found["prompt_ids"] == prompts
        own = TransformersEngine(each).generate(prompts, GREEDY)
        assert found["completion_ids"] == [one.ids for one in own]
        seen.append(found["completion_ids"])
        for logprobs, one in zip(found["logprobs"], own, strict=True):
            torch.testing.assert_close(torch.tensor(logprobs), one.logps, rtol=0, atol=1e-4)
    assert seen[0] != seen[1]
    words = client.generate(["What is one"], n=3, max_tokens=4)
    assert len(words["completion_ids"]) == 3 and len(words["prompt_ids"][0]) == 3
    chat = client.chat([[{"role": "user", "content": "hi"}]], max_tokens=2)
    assert len(chat["completion_ids"]) == 1
    client.close_communicator()
