"""Three steps of two processes with sharded parameters, over gloo: `torchrun ... -m tests.trainer.sharded_worker OUT HOW`.

HOW: `fsdp2` or `zero3`. The process with rank 0 writes the gathered weights and the log of each method into its folder.
"""

import copy
import importlib
import json
import os
import sys
from pathlib import Path

import torch

KINDS = ("fsdp2", "zero3")
SPREAD = "+sp2"  # the two processes share the tokens of each batch
METHODS = ("sft", "kto", "distillation", "self-distillation", "gkd", "gold", f"sft{SPREAD}", f"kto{SPREAD}")
DEEPSPEED = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True},
    "zero_allow_untested_optimizer": True,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}},
}  # fmt: skip
STEPS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3, "learning_rate": 1e-2,
    "optim": "adamw_torch", "max_grad_norm": 1.0, "adam_epsilon": 1e-4,
}  # fmt: skip


def use_fsdp_on_cpu() -> None:
    """accelerate (1.15) switches FSDP on for accelerators only: let it do the same for processes on CPUs."""
    os.environ.update(
        ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        FSDP_RESHARD_AFTER_FORWARD="true", FSDP_STATE_DICT_TYPE="FULL_STATE_DICT", FSDP_CPU_RAM_EFFICIENT_LOADING="false",
    )  # fmt: skip
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    inner, seen = AcceleratorState.__init__, []

    def init(self, *args, fsdp_plugin=None, **kwargs):
        inner(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        seen.extend([fsdp_plugin] if fsdp_plugin is not None else [])
        if seen:  # the state is shared, and every later look at it comes through here
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, seen[-1]

    AcceleratorState.__init__ = init


def use_deepspeed_on_cpu() -> None:
    """Without the all-reduce for inference that DeepSpeed would compile first, for a minute."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    backend = importlib.import_module("deepspeed.comm.torch")  # as an attribute, `deepspeed.comm.torch` is torch itself
    backend.build_shm_op = lambda: None


def shard(how: str) -> dict[str, dict]:
    """Switch sharding on, and return the settings of a trainer: nothing for `fsdp2`, the stage of `zero2` and `zero3`."""
    if how == "fsdp2":
        use_fsdp_on_cpu()
        return {}
    use_deepspeed_on_cpu()
    config = copy.deepcopy(DEEPSPEED)
    config["zero_optimization"]["stage"] = int(how[4])
    return {"deepspeed": config}


def models_of(method: str) -> dict:
    """A tiny Llama in float32, for KTO a reference from which its KL is above 0, for distillation a teacher or an adapter."""
    from peft import LoraConfig, get_peft_model

    from tests.tiny import tiny_model

    if method == "self-distillation":
        config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        model = tiny_model("llama", tie_word_embeddings=False)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return {"model": get_peft_model(model, config), "teacher": None}
    method = method.removesuffix(SPREAD)
    if method == "sft":
        return {"model": tiny_model("llama")}
    if method == "distillation":
        return {"model": tiny_model("llama"), "teacher": tiny_model("llama", seed=1, hidden_size=48)}
    if method == "gkd":
        return {"model": tiny_model("llama"), "teacher_model": tiny_model("llama", seed=1, hidden_size=48)}
    if method == "gold":
        return {
            "model": tiny_model("llama", vocab_size=400),
            "teacher_model": tiny_model("llama", seed=1, hidden_size=48, vocab_size=300),
        }
    return {"model": tiny_model("llama", seed=1), "ref_model": tiny_model("llama")}


def three_steps(method: str, models: dict, **settings):
    """A trainer after three steps."""
    from tests.trainer import kto_runs
    from tests.trainer.one_step import run

    if method.endswith(SPREAD):
        method = method.removesuffix(SPREAD)
        of_method = {"sft": {"per_device_train_batch_size": 4, "activation_offloading": True}}
        settings |= {"sp_size": 2, **of_method.get(method, {"per_device_train_batch_size": 8})}
    if method == "sft":
        return run(**models, **{**STEPS, **settings})[0]
    if method.endswith("distillation"):
        return run(models["model"], trainer_class=distillation_from(models["teacher"]), **{**STEPS, **settings})[0]
    if method in ("gkd", "gold"):  # completions of the student and of the teacher
        from tests.contracts import methods

        trainer = getattr(methods, method)(**models, **{**STEPS, **settings, "lmbda": 0.5, "seq_kd": True})
        trainer.remove_callback(trainer.keep)
        trainer.train()
        return trainer
    # KTO's policy runs twice in each step, the second time behind the keys of the first.
    own = {"beta": 0.1, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}
    trainer = kto_runs.make(**models, **{**STEPS, **own, **settings})
    trainer.remove_callback(trainer.keep)  # it asks for whole gradients
    trainer.train()
    return trainer


def distillation_from(model):
    """A trainer that learns from a model and, for some rows, from itself; None: from its base."""
    from trl import SFTTrainer
    from trl.models.reference import AdapterReference, FrozenModel, InitialPolicy
    from trl.models.scoring.causal import Scorer
    from trl.models.teacher import FrozenTeacher, SelfTeacher, TeacherByRow
    from trl.objectives.distillation import Divergence

    class Distillation(SFTTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if model is None:
                self.teacher = SelfTeacher(AdapterReference(self.scorer))
            else:
                live = SelfTeacher(InitialPolicy(self.model, self.scorer))
                self.teacher = TeacherByRow({"model": FrozenTeacher(FrozenModel(model, Scorer(model))), "live": live})
            self.teacher.prepare(self.accelerator)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            of_rows = (inputs["input_ids"][:, 0] % 3 == 0).long()
            found = self.teacher.divergence(self.scorer, model, {**inputs, "teacher": of_rows}, Divergence(0.0))
            return self.accelerator.num_processes * found.total / num_items_in_batch

    return Distillation


def main(out: str, how: str) -> None:
    settings = shard(how)
    torch.set_num_threads(1)
    models = {method: models_of(method) for method in METHODS}  # ZeRO-3, once on, shards new ones
    for method in METHODS:
        trainer = three_steps(method, models[method], **settings)
        assert how == "zero3" or type(trainer.model).__name__.startswith("FSDP")
        assert how == "fsdp2" or trainer.deepspeed.zero_optimization_partition_weights()
        save(trainer, Path(out, method))
    exit_now(trainer)


def save(trainer, out: Path) -> None:
    trainer.save_model(out)
    if trainer.is_world_process_zero():
        Path(out, "log.json").write_text(json.dumps(trainer.state.log_history))


def exit_now(trainer) -> None:
    trainer.accelerator.end_training()
    os._exit(0)  # DeepSpeed's own gloo groups stay open, and now and then abort the interpreter's exit


if __name__ == "__main__":
    main(*sys.argv[1:])
