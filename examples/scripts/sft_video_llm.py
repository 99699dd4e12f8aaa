"""Supervised fine-tuning of a vision-language model on chats about videos, each shown as a few of its frames.

    accelerate launch examples/scripts/sft_video_llm.py --model_name_or_path Qwen/Qwen2-VL-7B-Instruct \
        --dataset_name my/videos --video_column video --num_frames 8 --output_dir runs/video --dtype bfloat16 --use_peft

Rows have `messages` and the path of a video. The frames, evenly spaced, become the row's images, in front of the first user's
text. Animated GIF and WebP files are read by Pillow, all others by PyAV (`pip install av`).
"""

from dataclasses import dataclass, field

from datasets import load_dataset
from PIL import Image, ImageSequence, UnidentifiedImageError

from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config
from trl.scripts.loading import model_init_kwargs


@dataclass
class VideoArguments(ScriptArguments):
    video_column: str = field(default="video", metadata={"help": "Column with the path of each video."})
    num_frames: int = field(default=8, metadata={"help": "Frames that are shown of each video."})


def frames(path: str, count: int) -> list[Image.Image]:
    """Evenly spaced frames of a video, the first and the last among them."""
    try:
        with Image.open(path) as video:
            every = [frame.convert("RGB") for frame in ImageSequence.Iterator(video)]
    except UnidentifiedImageError:
        import av

        with av.open(path) as video:
            every = [frame.to_image() for frame in video.decode(video=0)]
    return [every[round(number * (len(every) - 1) / max(count - 1, 1))] for number in range(count)]


if __name__ == "__main__":
    parser = TrlParser((VideoArguments, SFTConfig, ModelConfig))
    parser.set_defaults(max_length=None)  # images soon reach the default of 1024 tokens
    script_args, training_args, model_args = parser.parse_args_and_config()
    training_args.model_init_kwargs = model_init_kwargs(model_args, training_args.model_init_kwargs)
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    column, count = script_args.video_column, script_args.num_frames
    dataset = dataset.map(lambda row: {"images": frames(row[column], count)}, remove_columns=[column])

    trainer = SFTTrainer(
        model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
