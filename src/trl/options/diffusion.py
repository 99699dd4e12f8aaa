"""Settings that the trainers of diffusion models share."""

from dataclasses import dataclass
from typing import Literal

from trl.options.groups import option, same
from trl.options.packages import is_bitsandbytes_available
from trl.options.shared import LoopOptions
from trl.options.training import TrainingDefaults

MixedPrecision = Literal["fp16", "bf16", "no"]


@dataclass
class DiffusionOptions(LoopOptions):
    """A run's name and place, sampling, and the optimiser. A process adds its rank to its seed of prompts."""

    run_name: str = option("", "Name of this run, for trackers only.")
    logdir: str = option("logs", "Folder of the checkpoints where project_kwargs has no project_dir.")
    num_epochs: int = option(100, "Epochs of a training run: each samples, scores and trains.", ">= 1")
    save_freq: int = option(1, "Save after each multiple of this many epochs, and the last. 0: never.", ">= 0")
    num_checkpoint_limit: int = option(5, "Checkpoints kept, where project_kwargs has no total_limit.", ">= 1")
    mixed_precision: MixedPrecision | None = option("fp16", "fp16 (GPUs only), bf16 or no. None: as accelerate says.")
    allow_tf32: bool = option(True, "Let matrix products on NVIDIA GPUs use TF32.")
    resume_from: str = option("", "A checkpoint_N folder, or one that has some: the last whole one. '': start anew.")
    sample_num_steps: int = option(50, "Denoising steps of an image.", ">= 1")
    sample_eta: float = option(1.0, "Share of DDPM's noise in a DDIM step; 0 is deterministic.", "[0, 1]")
    sample_guidance_scale: float = option(5.0, "Weight of classifier-free guidance; 1 or less: none.")
    negative_prompts: str | None = option("", "Negative prompt of guidance. None: ''.")
    noise_level: float = option(0.7, "Noise of a flow model's steps, 0: deterministic; not of DDIM.", ">= 0")
    resolution: int | None = option(None, "Side of a flow model's images in pixels. None: the model's.", ">= 8")
    train_batch_size: int = option(1, "Images per process and forward pass in training.", ">= 1")
    train_use_8bit_adam: bool = option(False, "Use AdamW8bit of bitsandbytes.")
    train_learning_rate: float = option(3e-4, "Learning rate of AdamW.", "> 0")
    train_adam_beta1: float = option(0.9, "AdamW's beta 1.", "[0, 1)")
    train_adam_beta2: float = option(0.999, "AdamW's beta 2.", "[0, 1)")
    train_adam_weight_decay: float = option(1e-4, "AdamW's weight decay.")
    train_adam_epsilon: float = option(1e-8, "AdamW's epsilon.")
    train_gradient_accumulation_steps: int = option(1, "Batches of images (all steps) per optimiser step.", ">= 1")
    train_max_grad_norm: float = option(1.0, "Largest norm of the gradient.", "(0, inf]")
    log_format: Literal["auto", "lines", "dict"] = same(TrainingDefaults, "log_format")
    push_to_hub: bool = option(False, "Upload the model at the end. Read by scripts only.")

    def check(self) -> None:
        """Raise on bad values."""
        super().check()
        if self.train_use_8bit_adam and not is_bitsandbytes_available():
            raise ImportError("train_use_8bit_adam needs bitsandbytes. Run `pip install 'trl[quantization]'`.")
