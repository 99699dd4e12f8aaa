"""What `test_vllm_engine.py` runs in processes of their own: `-m tests.generation.vllm_runs OUT.json KIND`."""

import gc
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from tests.trainer.resume_worker import tokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.agents import Endpoint
from trl.generation.engine import Sampling
from trl.generation.transformers.engine import TransformersEngine
from trl.generation.vllm.client import VLLMClient
from trl.generation.vllm.engine import VLLMEngine
from trl.generation.vllm.server_engine import VLLMServerEngine

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [5, 6, 7]] * 4


def model(seed: int = 0, *, tied: bool = False) -> LlamaForCausalLM:
    """A model whose heads vLLM has kernels for, and whose choices are not nearly ties."""
    torch.manual_seed(seed)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3)
    return made


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    settings = LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, modules_to_save=["lm_head"]
    )
    return get_peft_model(model(), settings)


def compared(policy: Any, context_length: int | None = None) -> dict[str, Any]:
    """vLLM and the embedded engine about one policy, before and after its weights change."""
    vllm, own = VLLMEngine(policy, context_length=context_length), TransformersEngine(policy)
    greedy = Sampling(max_new_tokens=10, do_sample=False, stop_token_ids=())
    vllm.sync_weights(policy, 0)
    pairs = [(vllm.generate(PROMPTS, greedy), own.generate(PROMPTS, greedy))]
    drawn = Sampling(max_new_tokens=10, temperature=0.7, seed=3, stop_token_ids=tuple(range(20, 40)))
    first = vllm.generate(PROMPTS, drawn)
    streams = list(range(len(PROMPTS)))[::-1]
    turned = vllm.generate(PROMPTS[::-1], drawn, streams=streams)[::-1]
    scored = [own_logps(policy, prompt, one.ids, 0.7) for prompt, one in zip(PROMPTS, first, strict=True)]
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    limits = vllm.generate(PROMPTS[:2], greedy, limits=[1, 4])
    with torch.no_grad():
        next(value for name, value in policy.named_parameters() if name.endswith("model.norm.weight")).mul_(-1)
    vllm.sync_weights(policy, 0)
    pairs.append((vllm.generate(PROMPTS, greedy), own.generate(PROMPTS, greedy)))
    changed = [name for name, value in policy.state_dict().items() if not torch.equal(value, before[name])]
    return {
        "same": [[a.ids == b.ids for a, b in zip(*pair, strict=True)] for pair in pairs],
        "gap": max(float((a.logps - b.logps).abs().max()) for a, b in zip(*pairs[0], strict=True)),
        "moved": [a.ids for a in pairs[0][0]] != [a.ids for a in pairs[1][0]],
        "turned": [a.ids == b.ids for a, b in zip(first, turned, strict=True)],
        "copies": first[0].ids != first[2].ids,
        "scored": max(
            float((one.logps - logps).abs().max()) for one, logps in zip(first, scored, strict=True)
        ),
        "stopped": [one.finish_reason == ("stop" if one.ids[-1] in range(20, 40) else "length") for one in first],
        "inner": [all(token not in range(20, 40) for token in one.ids[:-1]) for one in first],
        "limits": [len(one.ids) for one in limits],
        "changed": changed,
    }  # fmt: skip


def own_logps(policy: Any, prompt: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = policy(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def trained() -> list[dict[str, Any]]:
    """What GRPO logs that generates with vLLM and rewards even tokens."""

    def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    args = GRPOConfig(
        tempfile.mkdtemp(), use_vllm=True, vllm_mode="colocate", per_device_train_batch_size=16, num_generations=8,
        max_completion_length=6, max_steps=25, learning_rate=0.004, logging_steps=1, report_to="none", use_cpu=True,
        save_strategy="no", disable_tqdm=True, beta=0.0, seed=5,
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9], [10, 11, 12, 13]]})
    trainer = GRPOTrainer(model(), even, args, train_dataset=rows, processing_class=tokenizer())
    trainer.train()
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def shared() -> dict[str, Any]:
    """One copy of vLLM split over two processes, which ask it for unlike numbers of completions."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    policy, rank = model(), dist.get_rank()
    vllm = VLLMEngine(policy, parallel=2)
    vllm.sync_weights(policy, 0)
    greedy = Sampling(max_new_tokens=8, do_sample=False, stop_token_ids=())
    own = PROMPTS[: 2 + rank]
    found = vllm.generate(own, greedy)
    expected = TransformersEngine(policy).generate(own, greedy)
    vllm.close()
    gc.collect()
    if dist.is_initialized():  # vLLM may end it with its workers
        dist.destroy_process_group()
    return {"ids": [one.ids for one in found], "expected": [one.ids for one in expected]}


def sharing() -> dict[str, Any]:
    """Two processes whose sessions share the server at SERVER."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    policy = model(seed=3, tied=True)  # as the server's
    client = VLLMClient(os.environ["SERVER"], group_port=int(os.environ["GROUP_PORT"]))
    engine = VLLMServerEngine(policy, None if dist.get_rank() else client, device="cpu")
    return sessions(engine, policy)


def sessions(vllm: Any, policy: Any) -> dict[str, Any]:
    """Sessions side by side with vLLM behind the endpoint, before and after the weights change; and the embedded engine's tokens."""
    sampling, own = Sampling(max_new_tokens=8, do_sample=False, stop_token_ids=()), TransformersEngine(policy)
    found: dict[str, Any] = {"ids": [], "expected": [], "gaps": []}
    for step in range(2):
        vllm.sync_weights(policy, step)
        with Endpoint(vllm, tokenizer(), sampling=sampling) as endpoint:

            def agent(number: int, endpoint: Endpoint = endpoint) -> Any:
                session = endpoint.session()
                client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
                for length in (4, 8):
                    prompt = session.turns[-1].tokens if session.turns else PROMPTS[number]
                    stream = bool(number % 2)
                    answer = client.completions.create(
                        model="policy", prompt=[*prompt, 7], max_tokens=length, stream=stream
                    )
                    list(answer)
                return session.turns

            with ThreadPoolExecutor(4) as pool:
                turns = [turn for several in pool.map(agent, range(4)) for turn in several]
        for turn in turns:
            (one,) = own.generate([turn.context], sampling, limits=[turn.limit])
            found["ids"].append(turn.generated.ids)
            found["expected"].append(one.ids)
            found["gaps"].append(float((turn.generated.logps - one.logps).abs().max()))
        with vllm.live() as live, own.live() as exact:
            scored, expected = (each.prompt_logps([*PROMPTS[1], 9, 3], 4) for each in (live, exact))
        for name, places in (("ids", scored), ("expected", expected)):
            found[name].append([[(token, rank) for token, _, rank in place] for place in places])
        found["gaps"].append(max(abs(a[-1][1] - b[-1][1]) for a, b in zip(scored, expected, strict=True)))
        with torch.no_grad():
            policy.model.norm.weight.mul_(-1)
    return found


def served() -> dict[str, Any]:
    policy = model()
    return sessions(VLLMEngine(policy), policy)


KINDS = {
    "served": served,
    "sharing": sharing,
    "plain": lambda: compared(model(), 48),
    "adapted": lambda: compared(adapted()),
    "trained": trained,
    "shared": shared,
}

if __name__ == "__main__":
    out, kind = sys.argv[1:]
    found = KINDS[kind]()
    with open(f"{out}{os.environ.get('RANK', '')}", "w") as file:
        json.dump(found, file)
    if "RANK" not in os.environ or kind == "sharing":  # with others, vLLM has shared memory to give back
        os._exit(0)
