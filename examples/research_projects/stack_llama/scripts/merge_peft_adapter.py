"""Merges an adapter of stage 1 or 2 into its base, for the next stage.

    python examples/research_projects/stack_llama/scripts/merge_peft_adapter.py --base_model_name huggyllama/llama-7b \
        --adapter_model_name llama-se --output_name llama-se-merged

An adapter of stage 2 gives a classifier.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from trl import TrlParser


@dataclass
class Arguments:
    """What is merged."""

    adapter_model_name: str = field(metadata={"help": "Folder or name of the adapter."})
    base_model_name: str | None = field(
        default=None, metadata={"help": "Its base. None: the one that the adapter names."}
    )
    output_name: str = field(default="merged", metadata={"help": "Folder for the whole model."})


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """What a model says about eight tokens."""
    return model.eval()(input_ids=torch.arange(3, 11)[None]).logits


if __name__ == "__main__":
    parser = TrlParser(Arguments)
    (args,) = parser.parse_args_and_config()
    config = PeftConfig.from_pretrained(args.adapter_model_name)
    base = args.base_model_name or config.base_model_name_or_path or ""
    # Added in float32, and rounded once to the dtype of the base's files.
    model: Any = (
        AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype="float32")
        if config.task_type == "SEQ_CLS"
        else AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    )
    before = logits(model)
    adapted: Any = PeftModel.from_pretrained(model, args.adapter_model_name)
    expected = logits(adapted)
    merged = adapted.merge_and_unload()
    moved, error = (expected - before).abs().max(), (logits(merged) - expected).abs().max()
    merged.to(AutoConfig.from_pretrained(base).dtype).save_pretrained(args.output_name)
    AutoTokenizer.from_pretrained(base).save_pretrained(args.output_name)
    print(f"logits: the adapter moves them by up to {moved:.3f}, merging by {error:.1e}")
    print(f"merged model saved in {args.output_name}")
