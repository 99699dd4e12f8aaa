"""Model cards: what was trained on what, how, with which versions, and what to cite; written without network access."""

from collections.abc import Mapping, Sized
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Template

from trl import __version__
from trl.data.hub import may_be_on_hub
from trl.data.rendering import Json
from trl.reporting.trackers import get_comet_experiment_url, get_wandb_run_url

_FRAMEWORKS = ("transformers", "torch", "datasets", "accelerate", "tokenizers", "peft")

# Jinja; `card_data` is the YAML header.
_TEMPLATE = """---
{{ card_data }}
---

# {{ model_name }}

{{ origin }}{% if sources %} on {{ sources }}{% endif %}, made with {{ library }}.

## Use it
{% if hub_model_id == "." %}
Run this in the folder of this card:
{% endif %}
```python
{{ usage }}
```

## How it was trained

Method: {{ trainer_name }}
{%- if paper_id %}, from [{{ paper_title or paper_id }}](https://huggingface.co/papers/{{ paper_id }})
{%- elif paper_title %}, from "{{ paper_title }}"{% endif %}.
{% for name, url in (("Weights & Biases", wandb_url), ("Comet", comet_url)) if url %}
The run on {{ name }}: [{{ url }}]({{ url }})
{% endfor %}
| setting | value |
|---|---|
{% for name, value in facts.items() -%}
| {{ name }} | {{ value }} |
{% endfor %}
## Versions

{% for name, number in versions.items() -%}
- {{ name }}: {{ number }}
{% endfor %}
## Citation
{% for citation in citations if citation %}
```bibtex
{{ citation }}
```
{% endfor %}"""


class Paper(NamedTuple):
    """The paper of a method, of which a card's BibTeX is made."""

    title: str
    arxiv: str


_PAPER = """@misc{{arxiv-{id},
    title = {{{{{title}}}}},
    year = {{20{id:.2}}},
    eprint = {{{id}}},
    archivePrefix = {{arXiv}}
}}"""

HERE = "."  # the folder that a card stands in

# Settings that decide what a run computes, where a config has them.
_SETTINGS = (
    "learning_rate", "lr_scheduler_type", "num_train_epochs", "loss_type", "beta", "kl_coef", "num_generations",
    "num_iterations", "num_ppo_epochs", "epsilon", "cliprange", "scale_rewards", "temperature", "max_completion_length",
    "response_length", "max_length", "max_prompt_length", "packing", "seed", "bf16", "fp16",
)  # fmt: skip
_TIMES = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")

_GENERATION = """from transformers import pipeline

generator = pipeline("text-generation", model="{place}")
question = {question}
print(generator(question, max_new_tokens=128, return_full_text=False)[0]["generated_text"])"""

_SCORING = """from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{place}")
model = AutoModelForSequenceClassification.from_pretrained("{place}")
{ids}
print(model(ids).logits.item())  # the reward of the whole"""

_JUDGING_STEPS = """import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{place}")
model = AutoModelForTokenClassification.from_pretrained("{place}")
parts = ["What is 2 + 2 + 3?", "2 + 2 is 4.", {separator!r}]  # a prompt, a step, and what ends a step
ids = [id for part in parts for id in tokenizer.encode(part, add_special_tokens=False)]
print(model(torch.tensor([ids])).logits[0, -1].softmax(-1)[1].item())  # probability that the step is right"""

_CHAT = '[{"role": "user", "content": "What would you do with a free afternoon?"}]'
_JUDGED_CHAT = """messages = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]
ids = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt").input_ids"""
_JUDGED_TEXT = 'ids = tokenizer("What is 2 + 2? It is 4." + tokenizer.eos_token, return_tensors="pt").input_ids'


def generate_model_card(
    base_model: str | None, model_name: str, hub_model_id: str, dataset_name: str | list[str] | None, tags: list[str],
    wandb_url: str | None, trainer_name: str, trainer_citation: str | None = None, template_file: str | None = None,
    paper_title: str | None = None, paper_id: str | None = None, comet_url: str | None = None,
    training_facts: Mapping[str, object] | None = None, usage: str | None = None,
) -> ModelCard:  # fmt: skip
    """Fill a model card.

    `hub_model_id` is what the example loads ("." for the card's own folder), `paper_id` an arXiv id, `trainer_citation`
    BibTeX (default: of the paper), `training_facts` the table of settings, `usage` a Python example (default: a chat),
    `template_file` a Jinja file in place of ours.
    """
    datasets = [dataset_name] if isinstance(dataset_name, str) else list(dataset_name or [])
    on_hub = base_model if base_model and _is_hub_name(base_model) else None
    base = f"[{on_hub}](https://huggingface.co/{on_hub})" if on_hub else f"the model in `{base_model}`"
    data = ModelCardData(
        base_model=on_hub, datasets=[name for name in datasets if _is_hub_name(name)] or None,
        library_name="transformers", model_name=model_name, tags=["generated_from_trainer", *tags],
    )  # fmt: skip
    versions = {"trl": __version__}
    for package in _FRAMEWORKS:
        with suppress(PackageNotFoundError):  # an optional package
            versions[package] = version(package)
    if trainer_citation is None and paper_id and paper_title:
        trainer_citation = _PAPER.format(id=paper_id, title=paper_title)
    cite = "@misc{trl,\n    title = {{trl: Transformer Reinforcement Learning}},\n"
    names = [(name, f"[{name}](https://huggingface.co/datasets/{name})") for name in datasets]
    sources = [link if _is_hub_name(name) else f"`{name}`" for name, link in names]
    template = Path(template_file).read_text(encoding="utf-8") if template_file else _TEMPLATE
    text = Template(template).render(
        card_data=data.to_yaml(), base_model=on_hub, model_name=model_name, hub_model_id=hub_model_id,
        dataset_name=dataset_name, wandb_url=wandb_url, comet_url=comet_url, trainer_name=trainer_name,
        trainer_citation=trainer_citation, paper_title=paper_title, paper_id=paper_id,
        origin=f"A fine-tune of {base}" if base_model else "A model trained from its initial weights",
        sources=", ".join(sources), library=f"trl {__version__}", facts=training_facts or {},
        usage=usage or _GENERATION.format(place=hub_model_id, question=_CHAT), versions=versions,
        citations=[trainer_citation, f"{cite}    note = {{version {__version__}}}\n}}"],
    )  # fmt: skip
    return ModelCard(text)


def card_of_trainer(
    trainer: Any, *, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
) -> ModelCard:
    """The model card of a trainer's run, from its model, arguments, state, `_name`, `_paper` and `_tag_names`."""
    args = trainer.args
    place = getattr(trainer, "hub_model_id", None) or args.hub_model_id or HERE
    card = card_of_run(
        trainer, base_model=getattr(trainer.model.config, "_name_or_path", None) or None,
        model_name=model_name or Path(args.output_dir or "model").resolve().name, hub_model_id=place,
        dataset_name=dataset_name, tags=tags, training_facts=_training_facts(trainer), usage=_usage(trainer, place),
    )  # fmt: skip
    if getattr(trainer.model, "peft_config", None):
        card.data["library_name"] = "peft"
    return card


def is_generated(folder: Path) -> bool:
    """Whether the model card of a folder is one that a trainer wrote, or there is none."""
    file = folder / "README.md"
    return not file.is_file() or "generated_from_trainer" in file.read_text(encoding="utf-8", errors="replace")


def card_of_run(trainer: Any, *, tags: str | list[str] | None, **facts: Any) -> ModelCard:
    """`generate_model_card` with what the trainer's class says of its method."""
    more, paper = [tags] if isinstance(tags, str) else list(tags or []), trainer._paper
    if isinstance(paper, dict):  # of a subclass written for TRL: `title`, `id` and `citation`, all optional
        title, arxiv, citation = map(paper.get, ("title", "id", "citation"))
    else:
        title, arxiv, citation = *(paper or (None, None)), None
    return generate_model_card(
        tags=list(dict.fromkeys([*trainer._tag_names, *more])), wandb_url=get_wandb_run_url(),
        comet_url=get_comet_experiment_url(), trainer_name=trainer._name, trainer_citation=citation,
        paper_title=title, paper_id=arxiv, **facts,
    )  # fmt: skip


def _usage(trainer: Any, place: str) -> str:
    chats = bool(getattr(getattr(trainer, "processing_class", None), "chat_template", None))
    base = getattr(trainer.model, "get_base_model", None)
    name = type(base() if base is not None else trainer.model).__name__
    if name.endswith("ForSequenceClassification"):
        return _SCORING.format(place=place, ids=_JUDGED_CHAT if chats else _JUDGED_TEXT)
    if name.endswith("ForTokenClassification"):
        return _JUDGING_STEPS.format(place=place, separator=getattr(trainer.args, "step_separator", "\n"))
    return _GENERATION.format(place=place, question=_CHAT if chats else '"What would you do with"')


def _training_facts(trainer: Any) -> dict[str, object]:
    """The settings that decide what a run computes, its data, its length, and the figures of its last evaluation."""
    args, state = trainer.args, trainer.state
    facts = {name: getattr(args, name, None) for name in _SETTINGS}
    if args.max_steps > 0:
        facts["num_train_epochs"] = None  # which did not decide
        facts["epochs"] = round(state.epoch or 0, 2)
    facts["lr_scheduler_type"] = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    adapters = getattr(trainer.model, "peft_config", None) or {}
    for adapter in adapters.values() if isinstance(adapters, dict) else []:
        kind = adapter.peft_type.value
        facts |= {f"{kind} {name}": getattr(adapter, name, None) for name in ("r", "lora_alpha")}
    for name in ("train_dataset", "eval_dataset"):
        rows = getattr(trainer, name, None)
        if isinstance(rows, Sized) and not isinstance(rows, dict):
            facts[f"rows of {name}"] = len(rows)
    rows = args.train_batch_size * args.gradient_accumulation_steps * getattr(args, "data_processes", args.world_size)
    facts |= {"rows per optimiser step": rows, "optimiser steps": state.global_step}
    for entry in state.log_history:
        if "loss" in entry:
            facts["last training loss"] = f"{entry['loss']:.4g}"
        measured = {name: value for name, value in entry.items() if isinstance(value, (int, float))}
        names = [name for name in measured if name.startswith("eval_") and name not in _TIMES]
        facts |= {name: f"{measured[name]:.4g}" for name in names}
    return {name: value for name, value in facts.items() if value is not None and value is not False}


def _is_hub_name(name: str) -> bool:
    """Whether `name` reads as a Hub id (`owner/name` or `name`) and is no folder here."""
    return may_be_on_hub(name) and not Path(name).exists() and " " not in name


def trl_sanitze_kwargs_for_tagging(model: object, tag_names: list[str], kwargs: Json | None = None) -> Json | None:
    """Arguments of `push_to_hub` with `tag_names` among their `tags`; None stays None."""
    if kwargs is None:
        return None
    tags = kwargs.get("tags", [])
    return {**kwargs, "tags": [*([tags] if isinstance(tags, str) else tags), *tag_names]}
