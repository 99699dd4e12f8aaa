"""Sharded weights that two processes gather by parts: `torchrun ... -m tests.generation.weight_parts_worker FOLDER HOW PORT GROUP_PORT`.

HOW: `fsdp2`, `zero3`; or, in one process, `servers`: one that ends amid the weights that it is sent second, and another one in
its place.
"""

import hashlib
import json
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from tests.tiny import tiny_model
from tests.trainer.sharded_worker import DEEPSPEED, use_deepspeed_on_cpu

KINDS = ("tied", "lora", "mixtral", "qwen3_moe")
PERSISTENT = 40  # elements: ZeRO-3 leaves norms whole
PATIENCE_S = 0.3


def policy_of(kind):
    if kind == "tied":
        return tiny_model("llama", tie_word_embeddings=True)
    if kind != "lora":
        return tiny_model(kind)
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    adapter = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, modules_to_save=["lm_head"])
    return get_peft_model(tiny_model("llama"), adapter)


@torch.no_grad()
def checkpoint_weights(model):
    """All weights at once, by the names of a checkpoint without adapters."""
    from transformers.core_model_loading import revert_weight_conversion

    from trl.generation.vllm.weights import check_sendable, pieces_of
    from trl.models.parts import causal_core

    check_sendable(model)
    core, found = causal_core(model), {}
    for piece in pieces_of(core):
        found |= piece.tensors()
    return revert_weight_conversion(core, found)


def sharded(model, how, param_dtype=None):
    if how == "zero3":
        from trl.models.distributed import _frozen_engine

        config = {**DEEPSPEED, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
        del config["train_batch_size"], config["gradient_clipping"]
        zero = {**config["zero_optimization"], "stage3_param_persistence_threshold": PERSISTENT}
        engine = _frozen_engine(model, {**config, "zero_optimization": zero})
        for parameter in model.parameters():  # as DeepSpeed does for what trains
            if parameter.ds_numel <= PERSISTENT:
                parameter.ds_persist = True
                parameter.all_gather()
        return engine
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    core = model.get_base_model() if hasattr(model, "get_base_model") else model
    options = {
        "mesh": init_device_mesh("cpu", (2,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype),
    }
    for layer in core.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def whole_bytes(model, how):
    """What the parameters take that are whole in this process."""
    from torch.distributed.tensor import DTensor

    parameters = list(model.parameters())
    if how == "zero3":
        whole = [each for each in parameters if each.ds_status.name != "NOT_AVAILABLE"]
        assert all(each.numel() == each.ds_numel for each in whole)
        return sum(each.ds_numel * each.element_size() for each in whole)
    return sum(each.numel() * each.element_size() for each in parameters if not isinstance(each, DTensor))


def gathers_by_parts(kind, how, param_dtype=None):
    """Peak and bound of what is whole at any moment, in bytes, and how many parts there are."""
    from trl.generation.vllm import weights as weight_parts

    model = policy_of(kind)
    copied = policy_of(kind)
    expected = checkpoint_weights(copied if param_dtype is None else copied.to(param_dtype))
    sizes = {name: each.numel() * (param_dtype or each.dtype).itemsize for name, each in model.named_parameters()}
    wrapped = sharded(model, how, param_dtype)
    at_rest, seen = whole_bytes(model, how), []
    gathered = weight_parts.gathered_modules

    @contextmanager
    def watched(*args):
        with gathered(*args):
            seen.append(whole_bytes(model, how))
            yield
            seen.append(whole_bytes(model, how))
        assert whole_bytes(model, how) == at_rest

    weight_parts.gathered_modules = watched
    try:
        parts = weight_parts.WeightParts(wrapped)
        for _ in range(2):
            read_all(parts, expected)
        stopped_midway(parts)
        read_all(parts, expected)
    finally:
        weight_parts.gathered_modules = gathered
    layers = [sum(n for name, n in sizes.items() if f"layers.{number}." in name) for number in (0, 1)]
    rest = sum(sizes.values()) - sum(layers)
    bound = max(*layers, rest) + at_rest
    return wrapped, {"peak": max(seen), "bound": bound, "all": sum(sizes.values()), "parts": len(parts.parts)}


def read_all(parts, expected):
    """The weights that process 0 reads, bit for bit; the other one takes part."""
    if dist.get_rank():
        parts.take_part()
        return
    with parts.read() as weights:
        found = dict(weights)
    assert list(found) == list(parts.shapes) and found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == weight.dtype and torch.equal(found[name], weight), name


def stopped_midway(parts):
    """Process 0 raises after the first weight, and before any: what follows is gathered as if nothing had been."""
    for taken in (1, 0):
        if dist.get_rank():
            parts.take_part()
            continue
        try:
            with parts.read() as weights:
                for _ in range(taken):
                    next(weights)
                raise KeyError("amid the weights")
        except KeyError:
            pass


def sends_to_one_that_dies(wrapped, port, group_port):
    """The error that a process gets once the server does not come back, and after how many seconds."""
    from trl.generation.vllm.client import VLLMClient
    from trl.generation.vllm.server_engine import VLLMServerEngine

    client = None
    if not dist.get_rank():
        client = VLLMClient(server_port=int(port), group_port=int(group_port), connection_timeout=120.0)
    dist.barrier()
    engine = VLLMServerEngine(wrapped, client, patience=120.0, device="cpu")
    engine.sync_weights(wrapped, 0)
    engine.sync_weights(wrapped, 1)
    engine.patience, started = PATIENCE_S, time.monotonic()
    try:
        engine.sync_weights(wrapped, 2)
    except ConnectionError as error:
        return {"error": str(error), "seconds": time.monotonic() - started}
    return {"error": None}


def serve_and_die(folder, name, port):
    """A server that writes down which weights it received, and ends without a word amid those that come second."""
    from tests.generation.stand_in import TOKEN, StandIn
    from trl.generation.serving.app import GenerationServer

    class Dies(StandIn):
        def load(self, weights, *, whole):
            entries = [(getattr(torch, each.dtype), each.shape) for each in weights]
            assert self._receiving is not None
            self._receiving.announce()
            received = self._receiving.receive(entries)
            if not self.received:
                digest = hashlib.sha256()
                for each, tensor in zip(weights, received, strict=True):
                    digest.update(each.name.encode() + tensor.numpy().tobytes())
                Path(folder, f"{name}.txt").write_text(digest.hexdigest())
                self.received.append({each.name for each in weights})
                return
            for _ in range(len(entries) // 3):
                next(received)
            os._exit(0)

    GenerationServer("127.0.0.1", int(port)).serve(Dies(policy_of("mixtral")), token=TOKEN)


def main(folder: str, how: str, port: str, group_port: str) -> None:
    if how == "zero3":
        use_deepspeed_on_cpu()
    torch.set_num_threads(1)
    if how == "servers":
        for name in ("dies", "dies_again"):
            if (child := os.fork()) == 0:
                serve_and_die(folder, name, port)
            assert os.waitpid(child, 0)[1] == 0
        return
    dist.init_process_group("gloo")
    found, wrapped = {}, None
    if how == "fsdp2":
        _, found["bfloat16"] = gathers_by_parts("tied", how, torch.bfloat16)
    for kind in KINDS:
        wrapped, found[kind] = gathers_by_parts(kind, how)
    found["death"] = sends_to_one_that_dies(wrapped, port, group_port)
    Path(folder, f"found_{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's own gloo groups stay open, and now and then abort the interpreter's exit


if __name__ == "__main__":
    main(*sys.argv[1:])
