"""Two of the four rows in each of two processes: `torchrun --nproc_per_node 2 -m tests.trainer.ppo_worker OUT.pt`."""

import sys

import torch

from tests.trainer.ppo_runs import batch, make_trainer, value_model


def main(out: str) -> None:
    torch.set_num_threads(1)
    double = {"dtype": torch.float64}
    model = value_model("gpt2", **double)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make_trainer(
        model, value_model("gpt2", seed=1, **double), options={"optimizer": optimizer}, batch_size=2, mini_batch_size=1,
        gradient_accumulation_steps=2, whiten_rewards=True, use_score_scaling=True, max_grad_norm=0.5,
    )  # fmt: skip
    rank = trainer.accelerator.process_index
    own_rows = [column[2 * rank : 2 * rank + 2] for column in batch()]
    stats = trainer.step(*own_rows)
    folder = f"{out}.state"
    trainer.save_state(folder)
    weights = [weight.detach().clone() for weight in trainer.model.parameters()]
    again = trainer.step(*own_rows)["ppo/loss/total"]
    trainer.load_state(folder)
    for loaded, weight in zip(trainer.model.parameters(), weights, strict=True):
        assert torch.equal(loaded, weight)
    assert trainer.current_step == 1
    assert trainer.step(*own_rows)["ppo/loss/total"] == again
    trainer.load_state(folder)
    responses = trainer.generate(own_rows[0], do_sample=True, top_k=0, max_new_tokens=4, return_prompt=False)
    assert len(responses) == 2
    trainer.save_pretrained(f"{out}.model")
    if trainer.accelerator.is_main_process:
        own = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
        torch.save({"stats": stats, "weights": {name: weight.detach() for name, weight in own}}, out)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
