"""Runs a script of this folder on a small model of random weights and built-in rows, without a download.

    python examples/tiny.py dpo --output_dir runs/dpo

makes the model, its tokenizer and the rows in `OUTPUT_DIR/tiny`, and runs `examples/scripts/dpo.py` with options that name them.
Options on the command line override these. `python examples/tiny.py --help` lists the scripts.
"""

import argparse
import json
import random
import runpy
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from small_model import small_llama, train_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)

EXAMPLES = Path(__file__).resolve().parent
PAD, EOS, UNKNOWN = "<pad>", "<end>", "<unk>"
ROLES = ("<system>", "<user>", "<assistant>", "<image>")
CHAT = (
    "{%- for message in messages %}<{{ message.role }}> {% if message.content is string %}{{ message.content }} "
    "{% else %}{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }} {% endfor %}"
    "{% endif %}<end> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif -%}"
)
# Settings of `trl.PPOConfig`, and of `TrainingArguments`, for models this small.
TINY: dict[str, Any] = {
    "batch_size": 32, "mini_batch_size": 32, "backward_batch_size": None, "learning_rate": 3e-3, "init_kl_coef": 0.05,
}  # fmt: skip
TRAINING: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    "per_device_train_batch_size": 16, "learning_rate": 3e-3, "logging_steps": 5, "max_steps": 20,
}  # fmt: skip
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 60), "blue": (40, 60, 220)}
RUDE = ("idiot", "stupid", "hate", "trash", "shut", "loser")
CALM = [
    "thanks",
    "please",
    "kind",
    "help",
    "good",
    "fine",
    "you",
    "are",
    "this",
    "is",
    "the",
    "a",
    "person",
    "today",
]


def words_of(options: dict[str, Any]) -> list[str]:
    """Options as words of a command line."""
    values = {name: value if isinstance(value, (list, tuple)) else [value] for name, value in options.items()}
    return [str(word) for name, words in values.items() for word in (f"--{name}", *words)]


def run(script: str, words: Sequence[str]) -> dict[str, Any]:
    """Run a script of `RUNS` on its small parts, with further options; returns the script's names."""
    build, settings = RUNS[script]
    path = EXAMPLES / ("" if script.startswith("research_projects") else "scripts") / f"{script}.py"
    look = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    look.add_argument("--output_dir", default=f"runs/{path.stem}")
    folder, rest = look.parse_known_args(words)
    place = {} if script in WITHOUT_FOLDER else {"output_dir": folder.output_dir}
    options = {**place, **settings, **build(Path(folder.output_dir) / "tiny")}
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), *words_of(options), *rest]
    return runpy.run_path(str(path), run_name="__main__")


def figures(parser: argparse.ArgumentParser) -> Callable[[dict[str, Any]], None]:
    """What appends the figures of a run to the file `--out`. With `--table FILE` they are printed instead, and the program ends."""
    for name, text in (
        ("--out", "jsonl file to which the figures are appended"),
        ("--table", "such a file, to be printed as a table"),
    ):
        parser.add_argument(name, type=Path, default=argparse.SUPPRESS, help=text)
    look = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    look.add_argument("--out", type=Path)
    look.add_argument("--table", type=Path)
    given, rest = look.parse_known_args()
    sys.argv = [sys.argv[0], *rest]
    if given.table:
        rows = [json.loads(line) for line in given.table.read_text(encoding="utf-8").splitlines()]
        lines = [
            list(rows[0]),
            ["---"] * len(rows[0]),
            *([str(value) for value in row.values()] for row in rows),
        ]
        print("\n".join(f"| {' | '.join(line)} |" for line in lines))
        parser.exit()

    def append(found: dict[str, Any]) -> None:
        if given.out:
            with given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found, ensure_ascii=False) + "\n")

    return append


def save(folder: Path, rows: dict[str, list[dict[str, Any]]], *parts: Any) -> dict[str, Any]:
    """Save a model, in bfloat16 as most are, with its tokenizer, and rows by split; returns the options that name them."""
    for part in parts:
        if hasattr(part, "bfloat16"):
            part.bfloat16()
        part.save_pretrained(folder / "model")
    shutil.rmtree(folder / "rows", ignore_errors=True)  # of an earlier run
    for split, found in rows.items():
        path = folder / "rows" / f"{split}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        Dataset.from_list(found).to_parquet(path)
    return {"model_name_or_path": folder / "model", "dataset_name": folder / "rows"}


def manners(
    folder: Path, names: Sequence[str] = ("prompt", "chosen", "rejected"), words: Sequence[str] = ()
) -> dict[str, Any]:
    """Prompts with a calm answer and one with a rude word in it, and a small Llama of random weights.

    `names` are those of the columns; `words` are further ones that the tokenizer knows.
    """
    dice, rows = random.Random(0), []
    for _ in range(128):
        prompt, chosen, rejected = (dice.choices(CALM, k=count) for count in (3, 5, 5))
        rejected[dice.randrange(5)] = dice.choice(RUDE)
        texts = [" ".join(prompt), " " + " ".join(chosen), " " + " ".join(rejected)]
        rows.append(dict(zip(names, texts, strict=True)))
    tokenizer = word_tokenizer([*CALM, *RUDE, *words])
    return save(folder, {"train": rows, "test": rows[:16]}, word_model(tokenizer), tokenizer)


def stack_exchange(folder: Path) -> dict[str, Any]:
    """`manners` as questions, each with a better and a worse response."""
    return manners(folder, ("question", "response_j", "response_k"), ("Question:", "Answer:"))


def rewarded(folder: Path, rows: Callable[[Path], dict[str, Any]] = manners) -> dict[str, Any]:
    """`rows` with their policy, and a classifier that scores calm texts higher."""
    options = rows(folder)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(options["model_name_or_path"])
    save(folder / "reward", {}, classifier(tokenizer), tokenizer)
    return {
        **options,
        "sft_model_path": folder / "model",
        "reward_model_path": folder / "reward" / "model",
    }


def scored(folder: Path) -> dict[str, Any]:
    """`rewarded`, as the programs of online preferences name the models."""
    options = rewarded(folder)
    reward = options.pop("reward_model_path")
    del options["sft_model_path"]
    return options | {
        "reward_model": reward,
        "max_new_tokens": 8,
        "max_length": 32,
    }


def solutions(folder: Path, *, system: str) -> dict[str, Any]:
    """Sums as problems with solutions, and a model that imitates: it thinks every second time, and guesses the result."""
    dice = random.Random(0)
    rows = [
        {"problem": f"{left} + {right} =", "solution": rf"\boxed{{{left + right}}}"}
        for left in range(3)
        for right in range(3)
    ]
    answers = [rf"\boxed{{{number}}}" for number in range(5)]
    tokenizer = word_tokenizer(["+", "=", "<think>", "</think>", *map(str, range(5)), *answers])
    model, prompts = word_model(tokenizer), [row["problem"] for row in rows]

    def shown() -> tuple[list[str], None]:
        asked = dice.choices(prompts, k=32)
        thoughts = [f"<think> {prompt} </think> " * dice.randrange(2) for prompt in asked]
        said = [f"{thought}{dice.choice(answers)}" for thought in thoughts]
        return [chat(prompt, system) + f"{answer} {EOS}" for prompt, answer in zip(asked, said, strict=True)], None

    imitate(model, tokenizer, shown, steps=80)
    return save(folder, {"train": rows * 8, "test": rows}, model, tokenizer)


def taught(folder: Path) -> dict[str, Any]:
    """Sums with their results, a teacher that adds, and a student of random weights."""
    dice = random.Random(0)
    rows = [
        {"prompt": f"{left} + {right} =", "completion": f" {left + right}"} for left in range(5) for right in range(5)
    ]
    tokenizer = word_tokenizer(["+", "=", *map(str, range(9))])
    teacher, texts = word_model(tokenizer), [f"{row['prompt']}{row['completion']} {EOS}" for row in rows]
    imitate(teacher, tokenizer, lambda: (dice.choices(texts, k=32), None), steps=200)
    save(folder / "teacher", {}, teacher, tokenizer)
    options = save(folder, {"train": rows * 8, "test": rows}, word_model(tokenizer), tokenizer)
    return {**options, "teacher_model_name_or_path": folder / "teacher" / "model", "max_new_tokens": 4}


def chat(question: str, system: str) -> str:
    """A question as `CHAT` writes it, with the beginning of an answer."""
    return f"<system> {system} {EOS} <user> {question} {EOS} <assistant> "


def colours(folder: Path, *, images: int = 1, system: str | None = None) -> dict[str, Any]:
    """Images of one colour with questions about the last, and a small LLaVA; with a `system` prompt one that imitates guesses.

    Rows have every column that the examples read: `messages`, `prompt`, `chosen`, `rejected`, `problem`, `solution`, `images`.
    """
    from PIL import Image

    names, dice, rows = list(COLOURS), random.Random(0), []
    for number in range(48):
        shown = [names[(number + part) % 3] for part in range(images)]
        right, wrong = shown[-1], dice.choice([name for name in names if name != shown[-1]])
        places: list[dict[str, Any]] = [{"type": "image", "text": None}] * images
        question = {"role": "user", "content": [*places, {"type": "text", "text": "Which colour ?"}]}
        said = [[{"role": "assistant", "content": [{"type": "text", "text": one}]}] for one in (right, wrong)]
        noise = dice.randrange(-20, 20)
        pixels = [tuple(channel + noise for channel in COLOURS[name]) for name in shown]
        rows.append(
            {
                "images": [Image.new("RGB", (16, 16), colour) for colour in pixels],
                "messages": [question, *said[0]],
                "prompt": [question],
                "chosen": said[0],
                "rejected": said[1],
                "problem": "Which colour ?",
                "solution": str(names.index(right) + 1),
            }
        )
    model, processor = vision_model()
    if system is not None:
        asked, boxes = (
            chat("<image> Which colour ?", system),
            [rf"\boxed{{{number}}}" for number in (1, 2, 3)],
        )

        def guesses() -> tuple[list[str], list[Any]]:
            seen = dice.choices(rows, k=16)
            thoughts = [f"<think> {dice.choice(names)} </think> " * dice.randrange(2) for _ in seen]
            texts = [f"{asked}{thought}{dice.choice(boxes)} {EOS}" for thought in thoughts]
            return texts, [row["images"] for row in seen]

        imitate(model, processor, guesses, steps=100)
    return save(folder, {"train": rows, "test": rows[:6]}, model, processor)


def vision_model() -> tuple[Any, Any]:
    """A LLaVA of two layers that sees 16 x 16 pixels as four patches, and its processor."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    words = ["Which", "colour", "?", *COLOURS, "<think>", "</think>", *(rf"\boxed{{{n}}}" for n in (1, 2, 3))]
    tokenizer: Any = word_tokenizer(words, padding_side="left")
    tokenizer.image_token, tokenizer.image_token_id = "<image>", tokenizer.convert_tokens_to_ids("<image>")
    images = LlavaImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    processor = LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1, chat_template=CHAT,
    )  # fmt: skip
    layers = {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "image_size": 16,
        "patch_size": 8,
        **layers,
    }
    ids = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    text = {"model_type": "llama", "hidden_size": 64, "vocab_size": len(tokenizer), **layers, **ids}
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=tokenizer.image_token_id)
    return LlavaForConditionalGeneration(config), processor


def imitate(
    model: Any, processor: Any, shown: Callable[[], tuple[list[str], list[Any] | None]], *, steps: int
) -> float:
    """Train a model on the texts (and their images) that each call of `shown` gives; returns the last loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        texts, images = shown()
        given = {} if images is None else {"images": images}
        inputs = processor(text=texts, return_tensors="pt", padding=True, padding_side="right", **given)
        inputs.pop("token_type_ids", None)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def word_tokenizer(words: Iterable[str], marks: Iterable[str] = ROLES, **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer that knows some words, separated by spaces, and `marks`, which may stand anywhere."""
    every = [PAD, EOS, UNKNOWN, *dict.fromkeys([*words, *marks])]
    model = models.WordLevel({word: number for number, word in enumerate(every)}, unk_token=UNKNOWN)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens(list(marks))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, chat_template=CHAT, **options,
    )  # fmt: skip


def word_model(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0) -> LlamaForCausalLM:
    """One layer, 64 wide, of random weights."""
    return small_llama(tokenizer, seed=seed, layers=1, width=64)


def rude_texts(count: int, dice: random.Random) -> tuple[list[str], list[float]]:
    """Texts of calm words, half of them with a rude one, and whether they are harmless."""
    texts, harmless = [], []
    for number in range(count):
        words = dice.choices(CALM, k=dice.randint(3, 8))
        if number % 2:
            words[dice.randrange(len(words))] = dice.choice(RUDE)
        texts.append(" ".join(words))
        harmless.append(1.0 - number % 2)
    return texts, harmless


def classifier(
    tokenizer: PreTrainedTokenizerFast, *, rows: Callable[..., Any] = rude_texts, steps: int = 80
) -> LlamaForSequenceClassification:
    """A one-layer classifier trained for a few seconds on the texts and labels (1 or 0) of `rows(count, dice)`."""
    config = word_model(tokenizer, seed=1).config
    config.num_labels, dice = 1, random.Random(1)
    model = LlamaForSequenceClassification(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        texts, labels = rows(32, dice)
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"classifier trained, loss {loss.item():.3f}")
    return model.eval()


def counting(numbers: random.Random) -> dict[str, Any]:
    """Five steps that count on, 0 after 9; each is wrong with probability 0.4, and the next goes on from what it says."""
    at = numbers.randint(0, 9)
    prompt, steps, labels = f"Count on from {at}.\n", [], []
    for _ in range(5):
        following = (at + 1) % 10
        is_right = numbers.random() < 0.6
        said = following if is_right else numbers.choice([n for n in range(10) if n != following])
        steps.append(f"{at}, {said}")
        labels.append(is_right)
        at = said
    return {"prompt": prompt, "completions": steps, "labels": labels}


def steps(folder: Path) -> dict[str, Any]:
    """Lists of steps, a tokenizer of characters, and a Llama of two layers with a head for two classes."""
    tokenizer = train_tokenizer([], vocabulary=258)
    config = small_llama(tokenizer, seed=0, layers=2, width=64).config
    config.num_labels, config.initializer_range = 2, 0.1  # so wide that so small a model learns at once
    torch.manual_seed(0)
    model = LlamaForTokenClassification(config)
    splits = {"train": (4000, random.Random(0)), "test": (200, random.Random(1))}
    rows = {name: [counting(numbers) for _ in range(count)] for name, (count, numbers) in splits.items()}
    return save(folder, rows, model, tokenizer)


def videos(folder: Path) -> dict[str, Any]:
    """GIFs of three colours, the question which is the last, and the small LLaVA of `colours`."""
    from PIL import Image

    options, names, rows = colours(folder), list(COLOURS), []
    for number in range(48):
        shown = [names[(number + turn) % 3] for turn in range(3)]
        stills = [Image.new("RGB", (16, 16), COLOURS[name]) for name in shown]
        path = folder / f"{number}.gif"
        stills[0].save(path, save_all=True, append_images=stills[1:], duration=100)
        turns = [("user", "Which colour ?"), ("assistant", shown[-1])]
        messages = [{"role": role, "content": text} for role, text in turns]
        rows.append({"video": str(path), "messages": messages})
    return {**options, **save(folder, {"train": rows}), "num_frames": 2}


def calm_answers(folder: Path) -> dict[str, Any]:
    """Prompts with their calm answers."""
    return manners(folder, ("prompt", "completion", "rejected"))


def gemma(folder: Path) -> dict[str, Any]:
    """Prompts with calm answers, and a small Gemma 3."""
    options = calm_answers(folder)
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Gemma3ForCausalLM(config).save_pretrained(options["model_name_or_path"])
    return options


def embedded(folder: Path) -> dict[str, Any]:
    """`manners`, whose policy embeds the prompts, too."""
    options = manners(folder)
    return {**options, "embedding_model": options["model_name_or_path"]}


def summarised(folder: Path) -> dict[str, Any]:
    """`calm_answers` as posts with summaries."""
    return {**calm_answers(folder), "dataset_split": "test"}


def rude_prompts(folder: Path) -> dict[str, Any]:
    """A small Llama, a small classifier, and prompts with rude words."""
    options = rewarded(folder)
    texts, harmless = rude_texts(64, random.Random(0))
    rows = [{"comment_text": text, "label": int(not calm)} for text, calm in zip(texts, harmless, strict=True)]
    named = save(folder, {"test": rows})
    return {
        "model_type": options["model_name_or_path"],
        "classifier": options["reward_model_path"],
        "dataset_name": named["dataset_name"],
        "output_file": folder.parent / "toxicity.csv",
    }


def an_adapter(folder: Path) -> dict[str, Any]:
    """A small Llama, and an adapter of random weights over it."""
    name = stack_exchange(folder)["model_name_or_path"]
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(LlamaForCausalLM.from_pretrained(name), config).save_pretrained(str(folder / "adapter"))
    return {"base_model_name": name, "adapter_model_name": folder / "adapter", "output_name": folder.parent}


def pipeline(folder: Path) -> dict[str, Any]:
    """A small Stable Diffusion pipeline."""
    from small_diffusion import small_pipeline

    small_pipeline(folder / "tokenizer").save_pretrained(folder)
    return {"pretrained_model": folder}


def renamed(build: Callable[[Path], dict[str, Any]], **names: str) -> Callable[[Path], dict[str, Any]]:
    """The options of `build` under the names that a script has for them."""

    def built(folder: Path) -> dict[str, Any]:
        options = build(folder)
        return {name: options[known] for name, known in names.items()}

    return built


SYSTEM_PROMPT = r"Think about the problem between <think> and </think>, then give the answer in \boxed{}."
IMAGES = {**TRAINING, "max_steps": 30}
PROBLEMS = {**TRAINING, "num_generations": 8, "max_steps": 30, "beta": 0.0}
TEXT_PROBLEMS = {
    **PROBLEMS,
    "per_device_train_batch_size": 64,
    "max_completion_length": 10,
    "learning_rate": 1e-3,
}
IMAGE_PROBLEMS = {
    **PROBLEMS,
    "per_device_train_batch_size": 32,
    "max_completion_length": 8,
    "learning_rate": 5e-4,
}
ROLLOUTS = {
    **TRAINING, "per_device_train_batch_size": 32, "num_mini_batches": 1, "total_episodes": 32 * 20, "response_length": 4, "max_steps": -1,
    "temperature": 1.0, "logging_steps": 4, "num_ppo_epochs": 2,
}  # fmt: skip
STEPS = {**TRAINING, "per_device_train_batch_size": 32, "max_steps": 300, "lr_scheduler_type": "cosine", "warmup_steps": 30, "logging_steps": 50}  # fmt: skip
LOOP = {
    "subset": "", "batch_size": 32, "mini_batch_size": 32, "gradient_accumulation_steps": 1, "steps": 40, "output_min_length": 4,
    "output_max_length": 8, "learning_rate": 1e-2, "init_kl_coef": 0.05,
}  # fmt: skip
PACKED = {
    "subset": "", "size_valid_set": 16, "seq_length": 32, "no_fp16": True, "no_gradient_checkpointing": True, "learning_rate": 1e-2,
    "num_warmup_steps": 0, "eval_freq": 20, "use_cpu": True, "max_steps": 20, "batch_size": 16, "log_freq": 5,
}  # fmt: skip
DIFFUSION = {
    "mixed_precision": "no", "sample_num_steps": 4, "sample_guidance_scale": 1.0, "num_epochs": 3, "train_batch_size": 4,
    "train_learning_rate": 1e-2,
}  # fmt: skip
STACK, TOXICITY = "research_projects/stack_llama/scripts", "research_projects/toxicity/scripts"
TWO_IMAGES, VISION_PROBLEMS = partial(colours, images=2), partial(colours, system=SYSTEM_PROMPT)
TEXTS = partial(solutions, system=SYSTEM_PROMPT)
NAMED = {"model_name": "model_name_or_path", "dataset_name": "dataset_name"}
# What a script runs on, and its settings.
RUNS: dict[str, tuple[Callable[[Path], dict[str, Any]], dict[str, Any]]] = {
    "sft": (calm_answers, TRAINING),
    "sft_gemma3": (gemma, TRAINING),
    "sft_vlm": (colours, IMAGES),
    "sft_vlm_gemma3": (TWO_IMAGES, IMAGES),
    "sft_vlm_smol_vlm": (colours, IMAGES),
    "sft_video_llm": (videos, IMAGES),
    "reward_modeling": (manners, TRAINING),
    "prm": (steps, STEPS),
    "dpo": (manners, TRAINING),
    "dpo_vlm": (colours, IMAGES),
    "mpo_vlm": (colours, IMAGES),
    "cpo": (manners, TRAINING),
    "orpo": (manners, TRAINING),
    "bco": (embedded, TRAINING),
    "kto": (manners, TRAINING),
    "gkd": (taught, TRAINING),
    "dpo_online": (scored, TRAINING),
    "nash_md": (scored, TRAINING),
    "xpo": (scored, TRAINING),
    "gspo": (TEXTS, TEXT_PROBLEMS),
    "rloo": (TEXTS, TEXT_PROBLEMS),
    "grpo_vlm": (VISION_PROBLEMS, IMAGE_PROBLEMS),
    "gspo_vlm": (VISION_PROBLEMS, IMAGE_PROBLEMS),
    "rloo_vlm": (VISION_PROBLEMS, IMAGE_PROBLEMS),
    "online_dpo_vlm": (
        VISION_PROBLEMS,
        {
            **TRAINING,
            "per_device_train_batch_size": 8,
            "max_new_tokens": 8,
            "learning_rate": 5e-4,
            "max_steps": 30,
        },
    ),
    "ppo/ppo": (rewarded, ROLLOUTS),
    "ppo/ppo_tldr": (rewarded, {**ROLLOUTS, "missing_eos_penalty": 1.0, "dataset_test_split": "test"}),
    "evals/judge_tldr": (summarised, {"max_new_tokens": 5}),
    "ddpo": (pipeline, {**DIFFUSION, "sample_batch_size": 4, "reward": "compressible"}),
    "alignprop": (pipeline, {**DIFFUSION, "truncated_rand_backprop_minmax": (0, 3), "reward": "brightness"}),
    f"{STACK}/supervised_finetuning": (
        renamed(stack_exchange, model_path="model_name_or_path", dataset_name="dataset_name"),
        PACKED,
    ),
    f"{STACK}/reward_modeling": (
        renamed(stack_exchange, **NAMED),
        {**TRAINING, "subset": "", "learning_rate": 1e-2, "max_steps": 40},
    ),
    f"{STACK}/rl_training": (
        renamed(partial(rewarded, rows=stack_exchange), **NAMED, reward_model_name="reward_model_path"),
        LOOP,
    ),
    f"{STACK}/merge_peft_adapter": (an_adapter, {}),
    f"{TOXICITY}/evaluate-toxicity": (rude_prompts, {"max_new_tokens": 8}),
}
WITHOUT_FOLDER = ("evals/judge_tldr", f"{STACK}/merge_peft_adapter", f"{TOXICITY}/evaluate-toxicity")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", choices=RUNS, metavar="script", help=", ".join(RUNS))
    chosen, words = parser.parse_known_args()
    run(chosen.script, words)
