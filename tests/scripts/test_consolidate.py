"""`trl consolidate`: sharded weights become the files that `save_pretrained` writes, or are refused in a line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from trl.checkpoints.wholeness import SHARDED_WEIGHTS, publish
from trl.cli.main import main


def sharded_checkpoint(folder: Path, model, state=None) -> Path:
    """A checkpoint with the weights of one process, as accelerate names them."""
    written = folder / "_written"
    (written / SHARDED_WEIGHTS).mkdir(parents=True)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": state or model.state_dict()}, checkpoint_id=written / SHARDED_WEIGHTS, no_dist=True)
    model.config.architectures = [type(model).__name__]
    for part in (model.config, model.generation_config, tiny_tokenizer()):
        part.save_pretrained(written)
    (written / "trainer_state.json").write_text("{}")
    publish(written, folder / "checkpoint-4", {}, replaced=folder / "_replaced")
    return folder / "checkpoint-4"


@pytest.mark.parametrize(
    "architecture, options",
    {"llama": {}, "tied": {"tie_word_embeddings": True}, "mixtral": {"dtype": torch.bfloat16}}.items(),
)
def test_the_files_are_those_of_save_pretrained(architecture, options, tmp_path, capsys):
    """Also of tied weights, and of a mixture whose weights have other names in files."""
    model = tiny_model("llama" if architecture == "tied" else architecture, vocab_size=400, **options)
    model.generation_config.update(do_sample=True, temperature=0.5)
    checkpoint = sharded_checkpoint(tmp_path, model)
    assert main(["consolidate", str(checkpoint)]) == 0
    out = tmp_path / "checkpoint-4-model"
    assert capsys.readouterr().out == f"Model saved in {out}\n"
    model.save_pretrained(tmp_path / "expected")
    names = [path.name for path in (tmp_path / "expected").iterdir()]
    assert {"model.safetensors", "config.json", "generation_config.json"} <= {*names}
    written, expected = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "expected"))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], weight) for name, weight in expected.items())
    configs = [json.loads((folder / "config.json").read_text()) for folder in (out, tmp_path / "expected")]
    assert configs[0] == configs[1]
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == model.dtype and loaded.generation_config.temperature == 0.5


def test_other_folders_are_refused_in_a_line(tmp_path, model_path, capsys):
    def error(*line: object) -> str:
        assert main(["consolidate", *map(str, line)]) == 2
        return capsys.readouterr().err.removeprefix("trl consolidate: error: ")

    assert error(model_path) == (
        f"'{model_path}' has no pytorch_model_fsdp_0, expected a checkpoint of FSDP2 with SHARDED_STATE_DICT.\n"
    )
    model = tiny_model("llama", vocab_size=400)
    checkpoint = sharded_checkpoint(tmp_path, model)
    assert error(checkpoint, "--out", model_path) == (
        f"out must be a new or empty folder, got '{model_path}'. Name another one.\n"
    )
    other = sharded_checkpoint(tmp_path / "other", model, {"base_model.lora_A": torch.ones(2)})
    assert error(other).startswith(f"'{other}' has other weights than LlamaForCausalLM (21 missing, 1 unexpected: ")
    assert not other.with_name("checkpoint-4-model").exists()

    parts = next((checkpoint / SHARDED_WEIGHTS).glob("*.distcp"))
    content = bytearray(parts.read_bytes())
    content[len(content) // 2] ^= 1
    parts.write_bytes(content)
    assert f"is not whole: {SHARDED_WEIGHTS}/{parts.name} is not as it was written (by its checksum)" in error(
        checkpoint
    )
    parts.unlink()
    assert f"is not whole: {SHARDED_WEIGHTS}/{parts.name} is missing. Take another checkpoint." in error(checkpoint)
    unfinished = tmp_path / "_run-1" / "checkpoint-4"
    shutil.copytree(other, unfinished, ignore=shutil.ignore_patterns(".metadata", "checkpoint.json"))
    assert f"is not whole: {SHARDED_WEIGHTS}/.metadata is missing" in error(unfinished)
