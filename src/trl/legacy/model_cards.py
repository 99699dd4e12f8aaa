"""`MODEL_CARD_TEMPLATE` of 0.4-0.23: texts for `.format(...)`; trainers write `trl.reporting.model_card`'s."""

_CARD = """---
library_name: {library}
tags:
- trl
- {tag}
---

# {{model_name}}

Trained with trl by {method} ([paper](https://huggingface.co/papers/{paper})).

## Use it

```python
{usage}
```
"""
_TEXTS = """from transformers import pipeline

generator = pipeline("text-generation", model="{model_id}")
print(generator("What would you do with")[0]["generated_text"])"""
_IMAGES = """from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{model_id}")
pipeline("a cat").images[0].save("cat.png")"""

PPO = _CARD.format(library="transformers", tag="ppo", method="PPO", paper="1909.08593", usage=_TEXTS)
DDPO = _CARD.format(library="diffusers", tag="ddpo", method="DDPO", paper="2305.13301", usage=_IMAGES)
ALIGNPROP = _CARD.format(library="diffusers", tag="alignprop", method="AlignProp", paper="2310.03739", usage=_IMAGES)
