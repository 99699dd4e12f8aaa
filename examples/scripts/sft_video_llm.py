"""Supervised fine-tuning of a vision-language model on chats about videos, each shown as a few of its frames.

    accelerate launch examples/scripts/sft_video_llm.py --model_name_or_path Qwen/Qwen2-VL-7B-Instruct \
        --dataset_name my/videos --video_column video --num_frames 8 --output_dir runs/video --dtype bfloat16 --use_peft

Rows have `messages` and the path of a video. The frames, evenly spaced, become the row's images, in front of the first user's
text. Animated GIF and WebP files are read by Pillow, all others by PyAV (`pip install av`). `--tiny` makes GIFs that change
their colour, and teaches a small LLaVA to name the last one.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, ImageSequence, UnidentifiedImageError
from sft_vlm import train

from trl import ScriptArguments

sys.path.append(str(Path(__file__).resolve().parents[1]))
import tiny


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


def show_frames(dataset: Any, script_args: VideoArguments) -> Any:
    """Rows of messages and images, from rows of messages and videos."""
    column = script_args.video_column
    return dataset.map(
        lambda row: {"images": frames(row[column], script_args.num_frames)}, remove_columns=[column]
    )


def small_videos(folder: Path) -> dict[str, Any]:
    """GIFs of three colours, the question which is the last, and the small LLaVA of `tiny.colours`."""
    options, names, rows = tiny.colours(folder), list(tiny.COLOURS), []
    for number in range(48):
        shown = [names[(number + turn) % 3] for turn in range(3)]
        stills = [Image.new("RGB", (16, 16), tiny.COLOURS[name]) for name in shown]
        path = folder / f"{number}.gif"
        stills[0].save(path, save_all=True, append_images=stills[1:], duration=100)
        turns = [("user", "Which colour ?"), ("assistant", shown[-1])]
        messages = [{"role": role, "content": text} for role, text in turns]
        rows.append({"video": str(path), "messages": messages})
    return {**options, **tiny.save(folder, {"train": rows}), "num_frames": 2}


if __name__ == "__main__":
    trainer = train(small_videos, VideoArguments, show_frames)
