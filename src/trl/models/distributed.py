"""Models under DeepSpeed, FSDP and DDP: preparing frozen models, gathering sharded weights, unwrapping to generate."""

import copy
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers.integrations import is_deepspeed_zero3_enabled

from trl.models.peft import is_peft_model
from trl.models.switches import disable_gradient_checkpointing

_FSDP1_OPTIONS = (
    "cpu_offload", "auto_wrap_policy", "sync_module_states", "backward_prefetch", "forward_prefetch", "use_orig_params",
    "param_init_fn", "ignored_modules", "limit_all_gathers",
)  # fmt: skip


def prepare_deepspeed(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Wrap a frozen model (a reference, a reward model, a teacher) with the run's DeepSpeed config, in eval mode.

    Under ZeRO-3 its weights are sharded like the policy's. Below stage 3, without an optimiser, it runs at stage 0.
    """
    return _frozen_engine(model, deepspeed_config(accelerator.state))


def prepare_frozen_deepspeed(
    model: nn.Module, per_device_train_batch_size: int, fp16: bool = False, bf16: bool = False
) -> nn.Module:
    """`prepare_deepspeed` for loops without a trainer, with the config of this process's accelerate state.

    `per_device_train_batch_size` is in rows. Weights are cast if `fp16` or `bf16` is set, and sharded under ZeRO-3
    only. Raises ValueError for a run without DeepSpeed.
    """
    config = deepspeed_config(AcceleratorState())
    config.pop("train_batch_size", None)
    config |= {
        "train_micro_batch_size_per_gpu": per_device_train_batch_size,
        "gradient_accumulation_steps": 1,
        "fp16": {"enabled": fp16},
        "bf16": {"enabled": bf16},
    }
    return _frozen_engine(model, config)


def deepspeed_config(state: AcceleratorState) -> dict[str, Any]:
    plugin = state.deepspeed_plugin
    if plugin is None:
        raise ValueError("prepare_deepspeed needs a run under DeepSpeed. Launch with its accelerate config.")
    return copy.deepcopy(plugin.deepspeed_config)


def _frozen_engine(model: nn.Module, config: dict[str, Any]) -> nn.Module:
    """A frozen model under DeepSpeed, without the optimiser of `config`."""
    import deepspeed

    config.pop("optimizer", None)
    config.pop("scheduler", None)
    if config["zero_optimization"]["stage"] != 3:
        config["zero_optimization"] = {"stage": 0}
    elif hidden := getattr(getattr(model, "config", None), "hidden_size", 0):
        # Bucket sizes in elements, by DeepSpeed's own rule for transformers (its "auto" values).
        config["zero_optimization"] |= {
            "reduce_bucket_size": hidden * hidden,
            "stage3_param_persistence_threshold": 10 * hidden,
            "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    return engine


def prepare_fsdp(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Shard a frozen model with the run's FSDP plugin (version 1 or 2), in eval mode; a sharded one passes through."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        raise ValueError("prepare_fsdp needs a run under FSDP. Launch with an FSDP accelerate config.")
    if plugin.fsdp_version == 2:
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        model = fsdp2_prepare_model(accelerator, model)
    elif not isinstance(model, FullyShardedDataParallel):
        plugin.set_auto_wrap_policy(model)
        model = FullyShardedDataParallel(
            model,
            sharding_strategy=plugin.sharding_strategy or plugin.reshard_after_forward,
            mixed_precision=plugin.mixed_precision_policy,
            device_id=accelerator.device,
            **{name: getattr(plugin, name) for name in _FSDP1_OPTIONS},
        )
    return model.eval()


def is_sharded(model: nn.Module) -> bool:
    """Whether the model's weights are sharded over processes (ZeRO-3, FSDP of either version)."""
    parts = any(hasattr(p, "ds_id") or isinstance(p, DTensor) for p in model.parameters())
    return parts or any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def gathered_parameters(
    parameters: Iterable[nn.Parameter], modifier_rank: int | None = None
) -> AbstractContextManager[object]:
    """A block in which ZeRO-3 parameters are gathered on every rank; other parameters are left alone.

    All ranks keep what rank `modifier_rank` writes into them; with `None` nothing is kept.
    """
    sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not sharded:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(sharded, modifier_rank=modifier_rank)


class FSDP2Module(FSDPModule, nn.Module):
    """A module that FSDP2 shards, for type checkers: it derives such classes."""


def fsdp2_modules(model: nn.Module) -> list[FSDP2Module]:
    """The modules that FSDP2 shards, the outermost first, initialised: they can gather before the first forward."""
    sharded = [cast(FSDP2Module, module) for module in model.modules() if isinstance(module, FSDPModule)]
    if sharded:
        sharded[0]._get_fsdp_state()._lazy_init()  # otherwise the root's first forward does this (torch 2.13)
    return sharded


def reshard(model: nn.Module) -> None:
    """Free the gathered weights that FSDP2 modules keep after a forward; writes into them would be lost."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def fsdp2_units(model: nn.Module) -> dict[nn.Module, FSDP2Module]:
    """Each module's FSDP2 unit, which shards its parameters; modules without one are left out."""
    sharding: set[nn.Module] = set(fsdp2_modules(model))
    units: dict[nn.Module, FSDP2Module] = {}

    def visit(module: nn.Module, unit: FSDP2Module | None) -> None:
        unit = cast(FSDP2Module, module) if module in sharding else unit
        if unit is not None:
            units.setdefault(module, unit)
        for child in module.children():
            visit(child, unit)

    visit(model, None)
    return units


@contextmanager
def gathered_modules(modules: Sequence[nn.Module], units: Iterable[FSDP2Module] = ()) -> Iterator[None]:
    """A block in which the parameters of these modules and FSDP2 `units` are gathered on every rank; for reading only.

    All ranks must enter it together. What was gathered before stays so.
    """
    # ZeRO-3's persistent and already gathered parameters are whole.
    parameters = {
        parameter: None
        for module in modules
        for parameter in module.parameters()
        if getattr(getattr(parameter, "ds_status", None), "name", None) == "NOT_AVAILABLE"
    }
    resharded = [unit for unit in units if _is_resharded(unit)]
    with torch.no_grad(), gathered_parameters(parameters):
        for unit in resharded:
            unit.unshard()
        try:
            yield
        finally:
            for unit in resharded:
                unit.reshard()


def will_shard() -> bool:
    """Whether this run shards weights: accelerate by FSDP later, or ZeRO-3 when a model is loaded."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" or is_deepspeed_zero3_enabled()


def whole_shape(parameter: Tensor, unit: FSDP2Module | None = None) -> Tensor:
    """A meta tensor with the shape and dtype of the gathered parameter (by this FSDP2 unit)."""
    shape = getattr(parameter, "ds_shape", parameter.shape)  # a DTensor's is that of the whole
    dtype = parameter.dtype
    if unit is not None and dtype.is_floating_point and isinstance(parameter, nn.Parameter):
        dtype = unit._get_fsdp_state()._mp_policy.param_dtype or dtype  # gathered in it (torch 2.13)
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _is_resharded(unit: nn.Module) -> bool:
    """Whether an FSDP2 module's own parameters are not gathered."""
    if any(isinstance(parameter, DTensor) for parameter in unit.parameters(recurse=False)):
        return True
    inner = [child for child in unit.children() if not isinstance(child, FSDPModule)]
    return any(_is_resharded(child) for child in inner)


@contextmanager
def unwrap_model_for_generation(
    model: nn.Module,
    accelerator: Accelerator,
    gather_deepspeed3_params: bool = True,
    generation_kwargs: dict[str, Any] | None = None,
) -> Iterator[Any]:
    """A block that yields the model without its DDP, FSDP or DeepSpeed wrapper, ready for `generate`.

    Gradient checkpointing, which disables the key-value cache, is off inside, and `generation_kwargs` are set on the
    model's `generation_config`. ZeRO-3 weights are gathered once for the whole block, which needs room for the full
    model on each device; `gather_deepspeed3_params=False` keeps them sharded and gathers layer by layer (slower).
    FSDP1 weights are summoned; FSDP2 modules gather in their own hooks, so all ranks must generate equally often.
    """
    unwrapped: Any = accelerator.unwrap_model(model)
    plugin = accelerator.state.deepspeed_plugin
    with disable_gradient_checkpointing(unwrapped), ExitStack() as block:
        if generation_kwargs:
            # A `PeftModel` generates with the config of its base.
            owner = unwrapped.get_base_model() if is_peft_model(unwrapped) else unwrapped
            if (config := getattr(owner, "generation_config", None)) is not None:
                owner.generation_config = copy.deepcopy(config)
                block.callback(setattr, owner, "generation_config", config)
                owner.generation_config.update(**generation_kwargs)
        if isinstance(model, FullyShardedDataParallel):
            block.enter_context(FullyShardedDataParallel.summon_full_params(model, writeback=False))
        elif plugin is not None and plugin.zero_stage == 3 and gather_deepspeed3_params:
            block.enter_context(gathered_parameters(model.parameters()))
            block.callback(add_hooks, model)
            remove_hooks(model)
        yield unwrapped


def add_hooks(model: nn.Module) -> None:
    """Put a ZeRO-3 engine's gathering hooks back after `remove_hooks`; other engines are left alone."""
    offload = _parameter_offload(model)
    if offload is not None:
        offload._register_deepspeed_module(offload.module)


def remove_hooks(model: nn.Module) -> None:
    """Take a ZeRO-3 engine's gathering hooks off, and forget the order of gathering it has recorded."""
    offload = _parameter_offload(model)
    if offload is None:
        return
    for parameter in iter_params(offload.module, recurse=True):
        parameter.ds_active_sub_modules.clear()  # pyright: ignore[reportAttributeAccessIssue]
    for hook in [*offload.forward_hooks, *offload.backward_hooks]:
        hook.remove()
    offload.forward_hooks = []
    offload.backward_hooks = []


def _parameter_offload(model: nn.Module) -> Any | None:
    """The part of a ZeRO-3 engine that holds the hooks: the optimiser's, or the engine's own where nothing trains."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return None
    return getattr(optimizer, "parameter_offload", optimizer)


def get_all_parameters(sub_module: nn.Module, recurse: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Named parameters of a module, and those that DeepSpeed registered as used by it from outside."""
    external: Callable[[], Iterable[tuple[str, nn.Parameter]]] = getattr(sub_module, "ds_external_parameters", tuple)
    yield from sub_module.named_parameters(recurse=recurse)
    yield from external()


def iter_params(module: nn.Module, recurse: bool = False) -> list[nn.Parameter]:
    """The parameters of `get_all_parameters`, without their names."""
    return [parameter for _, parameter in get_all_parameters(module, recurse)]


def ensure_master_addr_port(addr: str | None = None, port: int | None = None) -> None:
    """Set `MASTER_ADDR` and `MASTER_PORT` for this process and those that it starts.

    What is given is set; else what the environment has stays; else they become `localhost` and a port that is free now.
    """
    os.environ["MASTER_ADDR"] = addr or os.environ.get("MASTER_ADDR", "localhost")
    os.environ["MASTER_PORT"] = str(port or os.environ.get("MASTER_PORT") or get_open_port())


def get_open_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
