"""Several adapters over one base model: the reward model is an adapter with a score head beside the policy's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trl.data.hub import loading_from_hub
from trl.models.lending import same_trainable, undisturbed
from trl.models.peft import is_peft_model, require_peft


def add_reward_adapter(model: Any, adapter: str, *, name: str, token: str | bool | None = None) -> nn.Linear:
    """Load a reward model's adapter into a `PeftModel` under `name`, frozen, and return its score head, frozen.

    `adapter` is a folder or Hub name that PEFT saved from a sequence classifier over the same base model. The active adapter
    stays active. Raises TypeError for a model without adapters, ValueError for one that has the name already and for an
    adapter without a score head.
    """
    require_peft()
    from peft import PeftConfig, set_peft_model_state_dict
    from peft.utils.save_and_load import load_peft_weights

    _check_policy(model, name)
    options: dict[str, Any] = {} if token is None else {"token": token}
    with loading_from_hub(adapter, "adapter"):
        config: Any = PeftConfig.from_pretrained(adapter, **options)
        weights = load_peft_weights(adapter, device="cpu", **options)
    config.modules_to_save, config.inference_mode = None, True  # the head is not in a language model
    head, rest = _split_head(weights, adapter)
    active = model.active_adapter
    with same_trainable(model):
        model.add_adapter(name, config)
        set_peft_model_state_dict(model, rest, adapter_name=name)
        model.set_adapter(active)
    _freeze(model, name)
    device = next(model.parameters()).device
    return head.to(device).requires_grad_(False).eval()


@torch.no_grad()
def adapter_scores(
    model: Any, head: nn.Module, inputs: dict[str, Any], *, adapter: str, policy_adapter: str
) -> Tensor:
    """What the reward adapter and its head say at every position, `(B, T) -> (B, T, C)`; the policy is left as it was.

    The score of a sequence is that of its last token.
    """
    with undisturbed(model), same_trainable(model) as put_back:
        try:
            model.set_adapter(adapter, inference_mode=True)
            put_back()
            outputs = model(**inputs, output_hidden_states=True, use_cache=False)
        finally:
            model.set_adapter(policy_adapter)
        states = (
            outputs.decoder_hidden_states if "decoder_hidden_states" in outputs else outputs.hidden_states
        )
        return head(states[-1].to(next(head.parameters()).dtype))


def _check_policy(model: Any, name: str) -> None:
    if not is_peft_model(model):
        raise TypeError(
            f"a reward adapter needs a policy that is a PeftModel, got {type(model).__name__}. Give peft_config too, so that "
            "the policy trains an adapter of its own."
        )
    if name in model.peft_config:
        raise ValueError(
            f"the model has an adapter named {name!r} already ({', '.join(model.peft_config)}). Choose another "
            "reward_adapter_name."
        )


def _split_head(weights: dict[str, Tensor], adapter: str) -> tuple[nn.Linear, dict[str, Tensor]]:
    """The score head and the adapter's other weights; modules trained as a whole stand among them under their own name."""
    parts = {key: key.rpartition(".")[2] for key in weights if ".score." in f".{key}"}
    found = {part: weights[key] for key, part in parts.items()}
    if "weight" not in found:
        raise ValueError(
            f"'{adapter}' has no score head (it holds {len(weights)} weights, none named score.weight). Train it with "
            "RewardTrainer and a LoRA config of task_type='SEQ_CLS', which saves the head too."
        )
    head = nn.Linear(found["weight"].shape[1], found["weight"].shape[0], bias="bias" in found)
    head.load_state_dict(found)
    return head.to(found["weight"].dtype), {key: value for key, value in weights.items() if key not in parts}


def _freeze(model: nn.Module, name: str) -> None:
    for key, parameter in model.named_parameters():
        if f".{name}." in key:
            parameter.requires_grad_(False)
