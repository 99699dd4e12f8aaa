"""A step-level loop that is killed and loads its state goes on to the same bits; queries come in the order of the seed."""

import random
import shutil

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from tests.tiny import tiny_model
from tests.trainer import ppo_runs
from tests.trainer.ppo_runs import make_trainer, value_model
from trl import AutoModelForCausalLMWithValueHead
from trl.checkpoints.wholeness import CheckpointError
from trl.data.step_inputs import ShuffledShares
from trl.models import step_state

ROWS = Dataset.from_dict(
    {
        "query": [f"q{i}" for i in range(11)],
        "input_ids": [[5 + i, 6, 7][: 1 + i % 3] for i in range(11)],
        "unused": [0] * 11,
    }
)


def new_trainer():
    model = value_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return make_trainer(
        model, options={"dataset": ROWS, "optimizer": optimizer, "lr_scheduler": schedule}, batch_size=4, mini_batch_size=2,
        ppo_epochs=2, use_score_scaling=True, use_score_norm=True, target=1.0, horizon=20,
    )  # fmt: skip


def loop(trainer, steps, folder=None):
    """Steps over as many passes as it takes; what each drew and found. The state after each goes into a `folder`."""
    trace = []
    while len(trace) < steps:
        for batch in trainer.dataloader:
            responses = trainer.generate(
                batch["input_ids"], return_prompt=False, do_sample=True, top_k=0, max_new_tokens=5
            )
            scores = [float(np.random.rand()) + random.random() + len(row) for row in responses]
            stats = trainer.step(batch["input_ids"], responses, scores)
            trace.append(
                (
                    batch["query"],
                    [row.tolist() for row in responses],
                    stats["ppo/loss/total"],
                    stats["objective/kl_coef"],
                )
            )
            if folder is not None:
                trainer.save_state(folder / f"state{len(trace)}")
            if len(trace) == steps:
                break
    return trace


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A trainer after five steps, what it drew, and the folder of another one that saved its state after each of four."""
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    trainer, folder = new_trainer(), tmp_path_factory.mktemp("states")
    expected = loop(trainer, 5)
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    assert loop(new_trainer(), 4, folder) == expected[:4]
    return trainer, expected, folder


@pytest.mark.parametrize("killed_after", [1, 2, 3])
def test_a_killed_loop_goes_on_to_the_same_bits(whole, killed_after):
    """Two batches are one pass: in the middle of a pass, at its end, and in the next one."""
    whole, expected, folder = whole
    torch.manual_seed(99), np.random.seed(99), random.seed(99)
    resumed = new_trainer()
    resumed.load_state(folder / f"state{killed_after}")
    assert resumed.current_step == killed_after
    assert loop(resumed, 5 - killed_after) == expected[killed_after:]
    for (name, found), wanted in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(found, wanted), name
    assert resumed.kl_ctl.value == whole.kl_ctl.value
    assert step_state.moments_state(resumed.running) == step_state.moments_state(whole.running)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_and_adapters_come_back(tmp_path, tied):
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False)

    def build():
        inner = tiny_model("llama", tie_word_embeddings=tied)
        model = AutoModelForCausalLMWithValueHead.from_pretrained(
            inner, summary_dropout_prob=0.0, **({} if tied else {"peft_config": lora})
        )
        return make_trainer(model)

    trainer = build()
    trainer.step(*ppo_runs.batch())
    trainer.save_state(tmp_path / "state")
    expected = trainer.step(*ppo_runs.batch())["ppo/loss/total"]
    resumed = build()
    resumed.load_state(tmp_path / "state")
    assert resumed.step(*ppo_runs.batch())["ppo/loss/total"] == expected


def test_a_save_that_is_killed_leaves_the_last_state_whole(tmp_path, monkeypatch):
    trainer = new_trainer()
    loop(trainer, 1)
    trainer.save_state(tmp_path / "state")
    value = trainer.kl_ctl.value
    loop(trainer, 1)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(step_state, "rng_states", killed)
        with pytest.raises(KeyboardInterrupt):
            trainer.save_state(tmp_path / "state")
    (tmp_path / "state").rename(step_state._beside(tmp_path / "state", "replaced"))  # killed between the two renames
    resumed = new_trainer()
    resumed.load_state(tmp_path / "state")
    assert (resumed.current_step, resumed.kl_ctl.value) == (1, value)
    resumed.save_state(tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_states_that_do_not_fit_are_named(tmp_path):
    trainer = new_trainer()
    with pytest.raises(FileNotFoundError, match="is missing"):
        trainer.load_state(tmp_path)
    trainer.save_state(tmp_path / "state")
    with pytest.raises(ValueError, match="was saved with an lr_scheduler"):
        make_trainer().load_state(tmp_path / "state")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a state."""
    folder = tmp_path_factory.mktemp("saved") / "state"
    new_trainer().save_state(folder)
    return folder


@pytest.mark.parametrize(
    "file", ["pytorch_model.bin", "optimizer.bin", "scheduler.bin", "random_streams_0.pt", "ppo_state.json"]
)
def test_a_state_that_lost_a_file_is_refused(file, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "state")
    (folder / file).write_bytes((folder / file).read_bytes()[:-9])
    trainer = new_trainer()
    with pytest.raises(CheckpointError, match=rf"state is not whole: {file} cannot be read, it may be truncated"):
        trainer.load_state(folder)
    if file != "ppo_state.json":  # without it, the folder is not taken for a state
        (folder / file).unlink()
        with pytest.raises(CheckpointError, match=f"{file} is missing"):
            trainer.load_state(folder)


def test_a_pass_takes_whole_batches_in_an_order_of_its_own():
    trainer = new_trainer()
    passes = [[query for batch in trainer.dataloader for query in batch["query"]] for _ in range(2)]
    assert len(trainer.dataloader) == 2
    assert all(len(set(queries)) == 8 for queries in passes)
    assert passes[0] != passes[1]
    assert trainer.dataloader.epoch == 2
    first = next(iter(new_trainer().dataloader))
    assert first["query"] == passes[0][:4]
    assert set(first) == {"query", "input_ids"}
    assert all(isinstance(ids, torch.Tensor) for ids in first["input_ids"])


def test_processes_share_the_rows_of_each_batch():
    whole = list(ShuffledShares(11, 4, seed=3, rank=0, processes=1))
    shares = [list(ShuffledShares(11, 2, seed=3, rank=rank, processes=2)) for rank in (0, 1)]
    assert [*shares[0][:2], *shares[1][:2], *shares[0][2:], *shares[1][2:]] == whole
