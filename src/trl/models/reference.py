"""Reference policies behind one interface: `reference.score(policy, batch, forward)`.

`make_reference` chooses once: a frozen model, or the policy with its adapter disabled or with another adapter.
"""

import copy
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch
from accelerate import Accelerator
from torch import nn

from trl.models.distributed import is_sharded, prepare_deepspeed, prepare_fsdp, will_shard
from trl.models.loading import create_model_from_path
from trl.models.packed.layout import Columns
from trl.models.parts import causal_core, embedded_tokens, share_parameters
from trl.models.peft import forbid_inference_packing, is_peft_model, is_quantized
from trl.models.reference_weights import adapter_weights, hash_weights, load_parameters, save_parameters
from trl.models.scoring.causal import Scorer
from trl.models.scoring.encoder_decoder import language_scorer
from trl.models.switches import same_trainable, undisturbed, without_ddp

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger(__name__)

T = TypeVar("T")
Forward = Callable[[Scorer, nn.Module, Columns], T]
"""(scorer, model, batch) -> what is computed with the reference, such as its log-probs."""

REFERENCE_FILE = "reference.safetensors"


class Reference(Protocol):
    """A policy that is not trained."""

    scorer: Scorer

    def active(self, policy: nn.Module) -> AbstractContextManager[nn.Module]:
        """A block that yields the reference as a module in eval mode; the policy is restored afterwards."""
        ...

    def prepare(self, accelerator: Accelerator) -> None:
        """Move a separate model to the device, or shard it like the policy."""

    def cast(self, dtype: torch.dtype) -> None:
        """Cast the weights of a separate model."""

    def fingerprint(self, policy: nn.Module) -> str:
        """A hash of the weights and settings that its log-probs depend on. All processes must call it."""
        ...

    def score(self, policy: nn.Module, batch: Columns, forward: Forward[T]) -> T:
        """`forward(scorer, model, batch)` of the reference, without gradient.

        `policy` may be wrapped (DDP, FSDP2, DeepSpeed). Its mode, `requires_grad` and random generators are restored.
        """
        with torch.no_grad(), self.active(policy) as model:
            return forward(self.scorer, model, batch)


class FrozenModel(Reference):
    """A separate model: given, loaded, or a copy of the initial policy.

    `module` holds the weights (callbacks that move the reference write into it); `model` is called: the same module or
    its DeepSpeed engine. `shared` names the parameters that it shares with the policy, which checkpoints hold already.
    """

    def __init__(self, model: nn.Module, scorer: Any, *, shared: frozenset[str] = frozenset()) -> None:
        self.scorer, self.shared = scorer, shared
        self.module = model
        self.model: Any = model.requires_grad_(False).eval()
        forbid_inference_packing(model)  # it would change the weights' bytes, and so the fingerprint

    @contextmanager
    def active(self, policy: nn.Module) -> Iterator[nn.Module]:
        with undisturbed(self.model):
            yield self.model

    def prepare(self, accelerator: Accelerator) -> None:
        """Shard it under FSDP and ZeRO-3, else move it to the device. A quantised or dispatched model is left alone."""
        if not is_movable(self.module):
            return
        if accelerator.state.deepspeed_plugin is not None:
            self.model = prepare_deepspeed(self.module, accelerator)
        elif getattr(accelerator.state, "fsdp_plugin", None) is not None:
            self.model = prepare_fsdp(self.module, accelerator)
        else:
            self.module.to(accelerator.device)

    def cast(self, dtype: torch.dtype) -> None:
        """Cast its weights, unless they are quantised or held by a DeepSpeed engine."""
        if self.model is self.module and not is_quantized(self.module):
            self.module.to(dtype)

    def fingerprint(self, policy: nn.Module) -> str:
        """Of its weights and config; of adapters also their configs and which are active."""
        settings = causal_core(self.module).config.to_dict()
        if is_peft_model(self.module):
            adapted: Any = self.module
            settings["adapters"] = {name: kind.to_dict() for name, kind in adapted.peft_config.items()}
            settings["active"] = adapted.active_adapters
        return hash_weights(self.module, settings=settings)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write its weights into a checkpoint (TR-DPO, BEMA). All processes must call it."""
        save_parameters(self.module, os.path.join(folder, REFERENCE_FILE), left_out=self.shared)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Load its weights from a checkpoint, bit for bit; warns if the checkpoint has none."""
        file = os.path.join(folder, REFERENCE_FILE)
        if os.path.isfile(file):
            load_parameters(self.module, file, left_out=self.shared)
        else:
            logger.warning("%s is missing: the reference restarts from its initial weights.", file)


class InitialPolicy(Reference):
    """The policy before its first optimiser step, for log-probs that are computed in advance."""

    def __init__(self, policy: nn.Module, scorer: Scorer) -> None:
        self.policy, self.scorer = policy, scorer

    @contextmanager
    def active(self, policy: nn.Module) -> Iterator[nn.Module]:
        model = without_ddp(policy)
        with undisturbed(model):
            yield model

    def prepare(self, accelerator: Accelerator) -> None:
        """Move the policy to the device, which DeepSpeed would do later."""
        if is_movable(self.policy):
            self.policy.to(accelerator.device)

    def fingerprint(self, policy: nn.Module) -> str:
        return hash_weights(self.policy, settings=causal_core(self.policy).config.to_dict())


class AdapterReference(Reference):
    """The policy's base with the adapter `adapter`, or None: with its adapter `trained` disabled.

    Without an adapter, modules in `modules_to_save` are the original ones.
    """

    def __init__(self, scorer: Scorer, adapter: str | None = None, trained: str = "default") -> None:
        self.scorer, self.adapter, self.trained = scorer, adapter, trained

    @contextmanager
    def active(self, policy: nn.Module) -> Iterator[nn.Module]:
        model = without_ddp(policy)
        with undisturbed(model), same_trainable(model) as put_back, self.switched(policy):
            put_back()
            yield model

    @contextmanager
    def switched(self, policy: nn.Module) -> Iterator[None]:
        """The policy with the reference's adapter and nothing else changed: PEFT may flip `requires_grad`."""
        adapted = _peft_model_in(policy)
        if self.adapter is None:
            with adapted.disable_adapter():
                yield
            return
        adapted.set_adapter(self.adapter, inference_mode=True)
        try:
            yield
        finally:
            adapted.set_adapter(self.trained)

    def fingerprint(self, policy: nn.Module) -> str:
        model = _peft_model_in(policy)
        left_out = {name for name, adapter in adapter_weights(model).items() if adapter != self.adapter}
        settings = causal_core(model).config.to_dict()
        if self.adapter is not None:
            settings["adapter"] = model.peft_config[self.adapter].to_dict()
        return hash_weights(model, settings=settings, left_out=left_out)


def is_movable(model: nn.Module) -> bool:
    """Whether `Module.to` may move it: it is neither quantised nor dispatched over devices."""
    return not (is_quantized(model) or hasattr(model, "hf_device_map"))


def _peft_model_in(policy: nn.Module) -> "PeftModel":
    return next(module for module in policy.modules() if is_peft_model(module))  # type: ignore[return-value]


# Settings of a config that `make_reference` reads, if the config has them.
_SETTINGS = (
    "ref_model_init_kwargs", "model_adapter_name", "ref_adapter_name", "force_use_ref_model", "model_init_kwargs",
    "precompute_ref_log_probs", "sync_ref_model",
)  # fmt: skip


def make_reference(
    policy: nn.Module, scorer: Scorer, ref_model: nn.Module | str | os.PathLike[str] | None = None, *,
    args: object = None, path: str | None = None, **settings: object,
) -> Reference:  # fmt: skip
    """The reference of a policy that is loaded and, with PEFT, wrapped, but not yet prepared by accelerate.

    `ref_model` is used as given, or loaded with `ref_model_init_kwargs`: in the dtype of its files, and in the policy's
    if it has the policy's `path` or follows it (`sync_ref_model`). Without it the reference of a `PeftModel` is its
    base with the adapter `ref_adapter_name` or none, and that of any other model a copy. A policy whose weights are
    already sharded (ZeRO-3) is loaded again from `path` with `model_init_kwargs`. With `precompute_ref_log_probs` the
    reference is used before training only, and nothing is copied. A config with `force_use_ref_model` refuses a
    `ref_model` beside an adapter without it. Activates `model_adapter_name` and freezes `ref_adapter_name`, in place.
    `scorer` scores the policy. `settings` take precedence over those of the config `args`. Raises: ValueError for
    settings that exclude each other or have no effect; FileNotFoundError, TypeError for what is no model.
    """
    options: Any = SimpleNamespace(**{name: settings.get(name, getattr(args, name, None)) for name in _SETTINGS})
    trained = choose_adapters(policy, options, ref_model)
    if ref_model is None and options.force_use_ref_model:
        logger.warning("force_use_ref_model=True has no effect without a ref_model.")
    shards = will_shard() or is_sharded(policy)
    if trained is not None and ref_model is not None and options.force_use_ref_model is False:
        raise ValueError("ref_model cannot be set with a PEFT model, unless force_use_ref_model=True.")
    if trained is not None and ref_model is None:
        if options.precompute_ref_log_probs and shards:
            raise ValueError("precompute_ref_log_probs=True with an adapter excludes ZeRO-3 or FSDP. Set it to False.")
        return AdapterReference(scorer, options.ref_adapter_name, trained)
    if ref_model is None and options.precompute_ref_log_probs and not shards:
        return InitialPolicy(policy, scorer)
    if isinstance(ref_model, nn.Module):
        model = ref_model
    elif ref_model is not None:
        name, kwargs = os.fspath(ref_model), options.ref_model_init_kwargs or {}
        if (name == path or options.sync_ref_model) and not is_quantized(policy):
            # As a copy: the divergence from the policy begins at 0, and a reference that moves keeps small updates.
            kwargs = {**({} if "torch_dtype" in kwargs else {"dtype": causal_core(policy).dtype}), **kwargs}
        model = create_model_from_path(name, **kwargs)
    elif not is_sharded(policy):
        model = copy.deepcopy(policy)
    elif path is not None:
        model = create_model_from_path(path, trained=True, **(options.model_init_kwargs or {}))
    else:
        raise ValueError("the model is sharded and cannot be copied. Pass ref_model, or model as a name.")
    if share_parameters(policy, model, trained=True):
        raise ValueError("ref_model and model share weights that train. Leave it out for a frozen copy.")
    ours, theirs = (bool(causal_core(part).config.is_encoder_decoder) for part in (policy, model))
    if ours != theirs:
        raise ValueError(f"ref_model has is_encoder_decoder={theirs}, the model {ours}.")
    ours, theirs = (embedded_tokens(causal_core(part)) for part in (policy, model))
    if ours != theirs:
        raise ValueError(
            f"ref_model has a vocabulary of {theirs} tokens, the model one of {ours}. Choose a reference of the same "
            "family, or use `ref_model.resize_token_embeddings`."
        )
    of_reference = language_scorer(model, pad_token_id=scorer.pad_token_id)
    of_reference.join(scorer.group)
    return FrozenModel(model, of_reference)


def choose_adapters(policy: Any, args: Any, ref_model: object = None) -> str | None:
    """Activate `args.model_adapter_name` and freeze `args.ref_adapter_name`; returns the active adapter's name.

    None for a policy without adapters. Raises: ValueError for names and settings that do not fit, TypeError for a
    `ref_model` that is no model.
    """
    is_path, held = isinstance(ref_model, (str, os.PathLike)), args.ref_adapter_name
    if args.ref_model_init_kwargs and not is_path:
        kind = "no ref_model" if ref_model is None else "a ref_model that is loaded already"
        raise ValueError(f"ref_model_init_kwargs needs ref_model as a name or path, got {kind}.")
    if not (ref_model is None or is_path or isinstance(ref_model, nn.Module)):
        raise TypeError(f"ref_model must be a model, or its name or path, got {type(ref_model).__name__}.")
    if ref_model is not None and held is not None:
        raise ValueError(f"ref_model and ref_adapter_name={held!r} cannot be combined; set one.")
    known = sorted(policy.peft_config) if is_peft_model(policy) else []
    for field in ("model_adapter_name", "ref_adapter_name"):
        if (name := getattr(args, field)) is not None and name not in known:
            raise ValueError(
                f"{field}={name!r} must be an adapter of the model, of {known or 'none'}. Load it with `load_adapter`."
            )
    if not known:
        return None
    trained = args.model_adapter_name or policy.active_adapter
    if trained == held:
        raise ValueError(f"ref_adapter_name={held!r} must be another adapter than the one that trains.")
    if policy.active_adapter != trained:
        policy.set_adapter(trained)
    owners = adapter_weights(policy)
    for name, parameter in policy.named_parameters():
        if held is not None and owners.get(name) == held:
            parameter.requires_grad_(False)
    return trained


# ---- callbacks that move the reference


@runtime_checkable
class MovesReference(Protocol):
    """A callback that writes into the weights of the reference `use_reference` gave it, if `moves_reference`."""

    @property
    def moves_reference(self) -> bool: ...

    def use_reference(self, reference: torch.nn.Module) -> None: ...


def attach_reference(
    callbacks: Iterable[object], reference: Reference | None, policy: nn.Module | None = None
) -> FrozenModel | None:
    """Give the frozen copy to the callback that moves it, and return it; None without such a callback.

    What is returned must be part of every checkpoint (`save`, `load`). Call it before the reference or the `policy`
    (None: not compared) is sharded or wrapped. Raises: ValueError for a reference that cannot move, for two such
    callbacks, or parameters that differ from the policy's.
    """
    movers = [mover for mover in callbacks if isinstance(mover, MovesReference) and mover.moves_reference]
    if not movers:
        return None
    names = " and ".join(type(callback).__name__ for callback in movers)
    if len(movers) > 1:
        raise ValueError(f"{names} move the reference's weights, one callback may. Leave the others out.")
    if not isinstance(reference, FrozenModel):
        kind = "none" if reference is None else f"a {type(reference).__name__}"
        raise ValueError(f"{names} needs a reference that is a model, not {kind}. Leave it or sync_ref_model out.")
    ours, theirs = (
        {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}
        for model in (policy or reference.module, reference.module)
    )
    if different := sorted(name for name, _ in ours.items() ^ theirs.items()):
        raise ValueError(f"{names} needs the model's parameters in ref_model, unlike {different[:3]}.")
    movers[0].use_reference(reference.module)
    return reference
