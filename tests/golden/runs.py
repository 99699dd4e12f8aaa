"""Runs a recorded case (`recorded/README.md`) with this library, and reads its numbers as they were recorded.

Online methods complete nothing: a `rollout_func` gives the recorded completions.
"""

import copy
import functools
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from torch import Tensor, nn

import trl

RECORDED = Path(__file__).parent / "recorded"
ASSETS = RECORDED / "assets"
MACHINE = ("runtime", "per_second", "flos", "_time", "time/", "step_time")
"""Parts of the names of numbers that say how fast a machine is."""

Case = dict[str, Any]
Rollout = Callable[[Any], tuple[list[int], list[int], list[float]]]
"""A prompt -> its tokens, its next recorded completion, and that completion's log-probs under another sampler."""


def cases_of(file: str) -> dict[str, Case]:
    """The cases of `recorded/FILE.json`, with one dict of numbers per step."""
    recorded = json.loads((RECORDED / f"{file}.json").read_text(encoding="utf-8"))
    cases = {}
    for name, case in recorded["cases"].items():
        base = {key: value for key, value in recorded["base_kwargs"].items() if key not in case.pop("without", ())}
        cases[name] = {**case, "name": name, "kwargs": {**base, **case["kwargs"]}}
        for kind in ("result", "result_tf5"):
            if kind in case:
                cases[name][kind] = unpacked(case[kind], recorded["weight_names"])
    return cases


def unpacked(result: dict[str, Any], weight_names: list[list[str]]) -> dict[str, Any]:
    """Metrics as rows and weights by name; files hold metrics as columns and each list of names once."""
    number, columns = result["steps"]["n"], result["steps"]["v"]
    steps = [{key: values[row] for key, values in columns.items() if values[row] is not None} for row in range(number)]
    names = weight_names[result["weights"]["names"]]
    return {**result, "steps": steps, "weights": dict(zip(names, result["weights"]["v"], strict=True))}


# --- what the cases ran with ------------------------------------------------------------------------------------------


class Assets:
    """The recorded models, tokenizers, rows and completions."""

    def __init__(self) -> None:
        self.meta = json.loads((ASSETS / "meta.json").read_text())

    def rows(self, name: str, count: int | None = None) -> list[dict[str, Any]]:
        lines = (ASSETS / "datasets" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines][:count]

    def scripts(self, name: str) -> list[list[list[int]]]:
        """For each row its completions, as tokens."""
        return json.loads((ASSETS / "scripts.json").read_text())[name]

    def tokenizer(self, name: str) -> Any:
        return transformers.AutoTokenizer.from_pretrained(ASSETS / name)

    def model(self, kind: str, name: str) -> Any:
        """A float32 model; its folder as text where `kind` is "path"."""
        return str(ASSETS / name) if kind == "path" else copy.deepcopy(loaded(kind, name))


@functools.cache
def loaded(kind: str, name: str) -> Any:
    task = {"causal": "CausalLM", "seqcls": "SequenceClassification", "tokcls": "TokenClassification"}[kind]
    return getattr(transformers, f"AutoModelFor{task}").from_pretrained(ASSETS / name).float()


@functools.cache
def first_logps(name: str, prompt: tuple[int, ...], completion: tuple[int, ...]) -> Tensor:
    """A completion's log-probs under a recorded model."""
    with torch.no_grad():
        logits = loaded("causal", name)(input_ids=torch.tensor([[*prompt, *completion]])).logits
    logps = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logps.gather(1, torch.tensor(completion)[:, None])[:, 0]


def ids_mod(prompts, completions, completion_ids, **columns) -> list[float]:
    return [((sum(ids) * 7) % 11 - 5) / 4 for ids in completion_ids]


def text_length(prompts, completions, **columns) -> list[float]:
    return [(len(text) % 9) / 3 for text in completions]


def chat_length(prompts, completions, **columns) -> list[float]:
    return [(len(chat[0]["content"]) % 9) / 3 for chat in completions]


def column_bonus(prompts, completions, bonus, **columns) -> list[float]:
    return [float(value) for value in bonus]


def prompt_length(prompts, completions, completion_ids, **columns) -> list[float]:
    return [(len(prompt) % 5) / 2 + len(ids) % 3 for prompt, ids in zip(prompts, completion_ids, strict=True)]


def sometimes_none(prompts, completions, completion_ids, **columns) -> list[float | None]:
    return [None if len(ids) % 3 == 0 else len(ids) / 6 for ids in completion_ids]


def rollout_field(prompts, completions, rollout_score, **columns) -> list[float]:
    return [float(value) for value in rollout_score]


def constant(prompts, completions, **columns) -> list[float]:
    return [1.0] * len(completions)


FUNCTIONS = (
    ids_mod,
    text_length,
    chat_length,
    column_bonus,
    prompt_length,
    sometimes_none,
    rollout_field,
    constant,
)
REWARDS: dict[str, Callable | str] = {function.__name__: function for function in FUNCTIONS}
REWARDS["model:rm"] = str(ASSETS / "rm")


# --- recorded completions ---------------------------------------------------------------------------------------------


def prompt_ids(tokenizer: Any, prompt: str | list[dict[str, Any]]) -> list[int]:
    if not isinstance(prompt, str):
        prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return tokenizer(prompt, add_special_tokens=False)["input_ids"]


def recorded_rollouts(assets: Assets, tokenizer: Any, case: Case) -> Rollout:
    """The k-th time that a prompt comes, it gets its k-th completion.

    The log-probs are those of the first policy with a small wave added, as a sampler that differs a little reports them.
    """
    numbers = {tuple(prompt_ids(tokenizer, row["prompt"])): n for n, row in enumerate(assets.rows(case["dataset"]))}
    script = assets.scripts(case["script"])
    seen = dict.fromkeys(numbers.values(), 0)

    def rollout(prompt: str | list[dict[str, Any]]) -> tuple[list[int], list[int], list[float]]:
        if not isinstance(prompt, str):
            texts = [message["content"] for message in prompt]
            texts = [text if isinstance(text, str) else text[0]["text"] for text in texts]
            prompt = [{**message, "content": text} for message, text in zip(prompt, texts, strict=True)]
        ids = prompt_ids(tokenizer, prompt)
        row = numbers[tuple(ids)]
        place = seen[row]
        seen[row] += 1
        completion = script[row][place % len(script[row])]
        logps = first_logps(case["model"][1], tuple(ids), tuple(completion)).tolist()
        wave = [0.25 * math.sin(1.7 * token + row + 3 * (place % len(script[row]))) for token in range(len(logps))]
        return ids, completion, [round(logp + shift, 6) for logp, shift in zip(logps, wave, strict=True)]

    return rollout


def make_rollout(rollout: Rollout, with_logprobs: bool, with_score: bool) -> Callable:
    """A `rollout_func`, with a column for rewards where the case has one."""

    def rollout_func(prompts: list, *args: object, **kwargs: object) -> dict[str, Any]:
        ids, completions, logps = map(list, zip(*map(rollout, prompts), strict=True))
        scores = {"rollout_score": [0.5 * (sum(tokens) % 5 - 2) for tokens in completions]}
        logprobs = logps if with_logprobs else None
        return {
            "prompt_ids": ids,
            "completion_ids": completions,
            "logprobs": logprobs,
            **(scores if with_score else {}),
        }

    return rollout_func


# --- a run ------------------------------------------------------------------------------------------------------------


def number(value: Any) -> Any:
    """Lists for tensors of several values; text for what JSON has no number for."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list):
        return number(value[0]) if len(value) == 1 else [number(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def numbers_of(entry: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The numbers of a log that do not measure the machine."""
    kept = {key for key in entry if key.startswith(prefix) and not any(part in key for part in MACHINE)}
    return {key: number(value) for key, value in entry.items() if key in kept and key != "step"}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: weight.detach().double().flatten().clone() for name, weight in named if weight.requires_grad}


def checksums(model: nn.Module, before: dict[str, Tensor]) -> dict[str, list[float]]:
    sums = {}
    for name, weight in weights_of(model).items():
        wave = torch.cos(0.37 * torch.arange(weight.numel(), dtype=torch.float64) + 0.1)
        change = weight - before.get(name, weight)
        sums[name] = [float(value) for part in (weight, change) for value in (part.norm(), (part * wave).sum())]
    return sums


def fill_adapter(model: nn.Module, meta: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(meta["adapter"]["seed"])
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "lora_A" in name or "lora_B" in name:
                weight.copy_(meta["adapter"]["scale"] * torch.randn(weight.shape, generator=generator))


class ExactLosses(transformers.TrainerCallback):
    """The sum of what `training_step` returned since the last log, which shows it with four decimals."""

    def __init__(self, trainer: transformers.Trainer) -> None:
        self.inner, self.pending, self.logged = trainer.training_step, [], []
        trainer.training_step = self.training_step  # type: ignore[method-assign]
        trainer.add_callback(self)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = self.inner(*args, **kwargs)
        self.pending.append(float(loss))
        return loss

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.logged.append(math.fsum(self.pending))
            self.pending.clear()


def make_trainer(case: Case, assets: Assets, folder: str) -> Any:
    """The trainer of a case, with everything that it names."""
    method = case["trainer"].removesuffix("Trainer")
    # Rollouts come from a function, so no engine completes anything.
    left_out = ("use_vllm", "vllm_mode") if case.get("script") else ()
    settings = {key: value for key, value in case["kwargs"].items() if key not in left_out}
    parts: dict[str, Any] = {"args": getattr(trl, f"{method}Config")(output_dir=folder, **settings)}
    parts["train_dataset"] = datasets.Dataset.from_list(assets.rows(case["dataset"], case.get("rows")))
    if case.get("eval_rows"):
        parts["eval_dataset"] = datasets.Dataset.from_list(assets.rows(case["dataset"])[-case["eval_rows"] :])
    if case.get("tok"):
        parts["processing_class"] = assets.tokenizer(case["tok"])
    if case.get("script"):
        rollout = recorded_rollouts(assets, parts["processing_class"], case)
        engine = case.get("fake_vllm")  # the recorded runs with vLLM's log-probs, and with its rollout functions
        parts["rollout_func"] = make_rollout(rollout, with_logprobs=bool(engine), with_score=engine == "rollout")
    for part, name in (("ref_model", "ref"), ("teacher_model", "teacher")):
        if case.get(name):
            parts[part] = assets.model(*case[name])
    if case.get("rewards"):
        parts["reward_funcs"] = [REWARDS[name] for name in case["rewards"]]
    model, adapter = assets.model(*case["model"]), dict(case.get("peft") or {})
    mode = adapter.pop("mode", None)
    if mode:
        from peft import LoraConfig, get_peft_model

        if mode == "model":
            model = get_peft_model(model, LoraConfig(**adapter))
        else:
            parts["peft_config"] = LoraConfig(**adapter)
    trainer = getattr(trl, case["trainer"])(model=model, **parts)
    if mode:
        fill_adapter(trainer.model, assets.meta)
    return trainer


def run_trainer(case: Case, assets: Assets) -> dict[str, Any]:
    """Train, and evaluate if the case does: what was logged, and the weights."""
    transformers.set_seed(1234)
    environment = dict(os.environ)
    try:
        with TemporaryDirectory() as folder:
            trainer = make_trainer(case, assets, folder)
            exact, before = ExactLosses(trainer), weights_of(trainer.model)
            trainer.train()
            steps = [numbers_of(entry) for entry in trainer.state.log_history if "loss" in entry]
            for entry, loss in zip(steps, exact.logged, strict=True):
                entry["loss_exact"] = loss
            result = {"steps": steps, "weights": checksums(trainer.model, before)}
            if case.get("eval_rows"):
                result["eval"] = numbers_of(trainer.evaluate(), "eval_")
            return result
    finally:
        os.environ.clear()
        os.environ.update(environment)


def value_head_model(assets: Assets, name: str, salt: int) -> Any:
    model = trl.AutoModelForCausalLMWithValueHead.from_pretrained(str(ASSETS / name), summary_dropout_prob=0.0)
    generator = torch.Generator().manual_seed(assets.meta["seed"] * 100 + salt)
    with torch.no_grad():
        for _, weight in sorted(model.v_head.named_parameters()):
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return model


def run_step_ppo(case: Case, assets: Assets) -> dict[str, Any]:
    """`PPOTrainer.step` on the recorded responses."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = value_head_model(assets, "lm", 1)
    reference = value_head_model(assets, case["ref"], 2) if case.get("ref") else None
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = {"optimizer": torch.optim.Adam(trained, **case["adam"])} if case.get("adam") else {}
    trainer = trl.PPOTrainer(trl.PPOConfig(**case["kwargs"]), model, reference, assets.tokenizer("tok"), **optimizer)
    if case.get("numpy_seed") is not None:
        np.random.seed(case["numpy_seed"])
    before, steps = weights_of(trainer.model), []
    for batch in case["inputs"]:
        lists = [batch["queries"], batch["responses"], map(float, batch["scores"])]
        lists += [batch["response_masks"]] if batch.get("response_masks") else []
        entry = numbers_of(trainer.step(*[[torch.tensor(row) for row in rows] for rows in lists]))
        steps.append({key: value for key, value in entry.items() if not isinstance(value, list) or len(value) <= 16})
    return {"steps": steps, "weights": checksums(trainer.model, before)}


def run_case(case: Case, assets: Assets) -> dict[str, Any]:
    return run_step_ppo(case, assets) if case["family"] == "ppo_step" else run_trainer(case, assets)
