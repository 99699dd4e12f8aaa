"""The policy and its reference as one model to generate from: the geometric mixture of their distributions."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.utils.generic import ModelOutput

from trl.models.packed.layout import Inputs
from trl.models.parts import CACHE, causal_core


class GeometricMixtureWrapper(GenerationMixin, nn.Module):
    """A model whose next-token distribution is `p^(1 - c) p_ref^c`, normalised, with `c = mixture_coef` in [0, 1].

    Its logits are log-probabilities. Neither model keeps a cache: each step reads the whole sequence.
    Source: Munos et al. 2023, Nash-MD, section 4 (arXiv:2312.00886). Raises ValueError for another coefficient.

    Example:
        >>> mixture = GeometricMixtureWrapper(model, ref_model, model.generation_config)  # doctest: +SKIP
        >>> mixture.generate(input_ids, max_new_tokens=16)  # doctest: +SKIP
    """

    main_input_name = "input_ids"
    base_model_prefix = ""
    _is_stateful = False
    _supports_cache_class = False

    def __init__(
        self, model: nn.Module, ref_model: nn.Module, generation_config: GenerationConfig, mixture_coef: float = 0.5,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if not 0 <= mixture_coef <= 1:
            raise ValueError(f"mixture_coef must be in [0, 1] (0: the policy alone), got {mixture_coef}.")
        self.model: Any = model
        self.ref_model: Any = ref_model
        self.config = causal_core(model).config
        self.generation_config = generation_config
        self.mixture_coef = mixture_coef
        self.device = device or next(model.parameters()).device

    @torch.no_grad()
    def forward(self, *args: object, **kwargs: object) -> ModelOutput:
        """The policy's outputs with the mixture's log-probabilities `(B, T, V)` as logits."""
        inputs = {**kwargs, "use_cache": False, CACHE: None}
        outputs = self.model(*args, **inputs)
        others = self.ref_model(*args, **inputs).logits
        mixed = (1 - self.mixture_coef) * outputs.logits.float() + self.mixture_coef * others.float()
        outputs.logits = mixed.log_softmax(dim=-1)
        return outputs

    def generate(self, *args: Any, **kwargs: Any) -> ModelOutput | Tensor:
        return super().generate(*args, **{**kwargs, "use_cache": False})  # pyright: ignore[reportAttributeAccessIssue]

    def prepare_inputs_for_generation(self, *args: object, **kwargs: object) -> Inputs:
        """The policy's own inputs of a step, for the whole sequence."""
        without_cache = {"use_cache": False, CACHE: None}
        return self.model.prepare_inputs_for_generation(*args, **{**kwargs, **without_cache})

    # transformers validates the class and the signature of what generates: use the policy's.
    def _validate_model_class(self) -> None:
        self._policy()._validate_model_class()

    def _validate_model_kwargs(self, model_kwargs: Inputs) -> None:
        self._policy()._validate_model_kwargs(model_kwargs)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in ("model", "ref_model") else getattr(self._policy(), name)

    def _policy(self) -> Any:
        return causal_core(self.model)
