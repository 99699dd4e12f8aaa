"""Steps of PPO in two processes with sharded weights over gloo: `torchrun ... -m tests.trainer.ppo_sharded FOLDER HOW`.

HOW: one of `KINDS`. Each process has two of the four rows; that of rank 0 writes what `steps` found.
"""

import sys

import torch

from tests.trainer.ppo_runs import batch, make_trainer, value_model
from tests.trainer.sharded_worker import shard

KINDS = ("fsdp2", "zero3")
STEPS = {"ppo_epochs": 2, "whiten_rewards": True, "use_score_scaling": True, "max_grad_norm": 0.5}


def trainer_of(**settings):
    """A trainer of float32 weights; no step is so long that a minibatch is left out."""
    model = value_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-4)
    return make_trainer(model, options={"optimizer": optimizer}, **STEPS, **settings)


def steps(trainer, rows: slice, folder: str = "") -> dict:
    """Two steps on some of the rows, what is generated before and after; with a `folder` the second is made twice."""
    own = [column[rows] for column in batch()]
    found = {"before": responses_of(trainer, own[0]), "stats": [trainer.step(*own)]}
    if folder:
        trainer.save_state(folder)
    found["stats"].append(trainer.step(*own))
    found["after"] = responses_of(trainer, own[0])
    if not folder:
        return found
    trainer.load_state(folder)
    again = trainer.step(*own)
    for name in ("ppo/loss/total", "ppo/returns/mean", "objective/kl"):
        assert again[name] == found["stats"][1][name], name
    assert responses_of(trainer, own[0]) == found["after"]
    return found


def responses_of(trainer, queries) -> list[list[int]]:
    found = trainer.generate(queries, do_sample=True, top_k=0, max_new_tokens=6, return_prompt=False)
    return [row.tolist() for row in found]


def deepspeed_plugin(config: dict):
    from accelerate import DeepSpeedPlugin

    config.pop("optimizer")  # the trainer's own
    config |= {
        "gradient_accumulation_steps": 2,
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": 4,
        "gradient_clipping": 0.5,
    }
    return DeepSpeedPlugin(hf_ds_config=config)


def main(folder: str, how: str) -> None:
    options = {}
    if settings := shard(how):
        options["deepspeed_plugin"] = deepspeed_plugin(settings["deepspeed"])
    from trl.models.distributed import is_sharded

    torch.set_num_threads(1)
    trainer = trainer_of(batch_size=2, mini_batch_size=1, gradient_accumulation_steps=2, accelerator_kwargs=options)
    assert is_sharded(trainer.model)
    assert (trainer.accelerator.state.deepspeed_plugin is None) == (how == "fsdp2")
    rank = trainer.accelerator.process_index
    found = steps(trainer, slice(2 * rank, 2 * rank + 2), folder=f"{folder}/{how}.state")
    trainer.save_pretrained(f"{folder}/{how}.model")
    if rank == 0:
        torch.save(found, f"{folder}/{how}")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
