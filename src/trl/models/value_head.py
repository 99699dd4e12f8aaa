"""Language models with a value head: one more number per token, the expected reward from there on."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, Cache, PretrainedConfig

from trl.models.parts import CACHE, causal_core
from trl.models.value_wrapper import PREFIX, PreTrainedModelWrapper, last_hidden

INIT_STRATEGIES = (None, "normal")


class ValueHead(nn.Module):
    """Dropout and one linear unit, `summary`, in float32: hidden states `(..., H) -> (..., 1)`."""

    def __init__(self, config: PretrainedConfig, summary_dropout_prob: float | None = None) -> None:
        super().__init__()
        default = getattr(config, "summary_dropout_prob", 0.1)
        self.dropout = nn.Dropout(default if summary_dropout_prob is None else summary_dropout_prob)
        config = config.get_text_config(decoder=True)
        width = getattr(config, "word_embed_proj_dim", None) or config.hidden_size  # the former of OPT
        self.summary = nn.Linear(width, 1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The value at each position, in the head's dtype, also under autocast, and on the head's device."""
        states = hidden_states.to(self.summary.weight)
        with torch.autocast(states.device.type, enabled=False):
            return self.summary(self.dropout(states))


class _WithValueHead(PreTrainedModelWrapper):
    """Base of both kinds. `forward` returns logits, the loss where labels are given, and values `(B, T)`."""

    supported_args = ("summary_dropout_prob", "v_head_initializer_range", "v_head_init_strategy")
    supported_modules = ("v_head",)
    lm_head_namings: ClassVar[list[str]] = ["lm_head", "embed_out"]

    def __init__(self, pretrained_model: Any, **kwargs: Any) -> None:
        settings = {name: kwargs.pop(name) for name in self.supported_args if name in kwargs}
        super().__init__(pretrained_model, **kwargs)
        base = causal_core(pretrained_model)
        seq2seq, auto_class = bool(base.config.is_encoder_decoder), self.transformers_parent_class
        if base.get_output_embeddings() is None or seq2seq != (auto_class is AutoModelForSeq2SeqLM):
            raise TypeError(f"model must be one of {auto_class.__name__}, got {type(base).__name__}.")
        self.v_head = ValueHead(self.config, settings.get("summary_dropout_prob"))
        strategy, spread = settings.get("v_head_init_strategy"), settings.get("v_head_initializer_range", 0.2)
        if strategy not in INIT_STRATEGIES:
            raise ValueError(f"v_head_init_strategy must be None or 'normal', got {strategy!r}.")
        if strategy == "normal":
            nn.init.normal_(self.v_head.summary.weight, std=spread)
            nn.init.zeros_(self.v_head.summary.bias)
        head = self.get_output_embeddings()
        device = next(head.parameters()).device if head is not None else self.device
        self.v_head.to(self.device if device.type == "meta" else device)

    def forward(
        self, input_ids: Tensor | None = None, past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None, return_past_key_values: bool = False, **kwargs: object,
    ) -> tuple[Tensor | Cache | None, ...]:  # fmt: skip
        """`(lm_logits (B, T, V) float32, loss or None, value (B, T))`, and with `return_past_key_values` the cache."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, CACHE: past_key_values}
        kwargs |= {name: value for name, value in inputs.items() if value is not None}
        outputs = self.pretrained_model(**{**kwargs, "output_hidden_states": True})
        value = self.v_head(last_hidden(outputs)).squeeze(-1).to(outputs.logits.device)
        logits = outputs.logits.to(torch.promote_types(outputs.logits.dtype, torch.float32))
        cache = (getattr(outputs, CACHE),) if return_past_key_values else ()
        return logits, outputs.loss, value, *cache

    def post_init(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load the head's weights, `v_head.*`, from those of a checkpoint, if it has any.

        Raises: ValueError for a head of another width.
        """
        weights = {key.removeprefix(PREFIX): x for key, x in state_dict.items() if key.startswith(PREFIX)}
        if not weights:
            return
        expected, saved = self.v_head.summary.weight.shape, weights["summary.weight"].shape
        if expected != saved:
            raise ValueError(f"the value head saved has shape {tuple(saved)}, expected {tuple(expected)}.")
        self.v_head.load_state_dict(weights)

    def added_weights(self) -> dict[str, Tensor]:
        return {f"{PREFIX}{name}": weight for name, weight in self.v_head.state_dict().items()}


class AutoModelForCausalLMWithValueHead(_WithValueHead):
    """A decoder with a value head, `v_head`, for PPO.

    `summary_dropout_prob` (0.1, or the config's) is the dropout before the head; `v_head_init_strategy="normal"` draws
    its weight with standard deviation `v_head_initializer_range` (0.2), None as torch does.

    Example:
        >>> model = AutoModelForCausalLMWithValueHead.from_pretrained("my/model")  # doctest: +SKIP
        >>> logits, loss, values = model(input_ids=input_ids, attention_mask=attention_mask)  # doctest: +SKIP
    """

    transformers_parent_class = AutoModelForCausalLM


class AutoModelForSeq2SeqLMWithValueHead(_WithValueHead):
    """An encoder-decoder with a value head over its decoder; arguments as in `AutoModelForCausalLMWithValueHead`."""

    transformers_parent_class = AutoModelForSeq2SeqLM
    lm_head_namings: ClassVar[list[str]] = ["lm_head", "embed_out", "output_projection"]


ModelWithValueHead = AutoModelForCausalLMWithValueHead | AutoModelForSeq2SeqLMWithValueHead
SUPPORTED_ARCHITECTURES = (AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead)
