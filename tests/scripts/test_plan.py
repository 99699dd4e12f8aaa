"""`trl plan`: planned bytes against those of a real step, what devices share, what fits, levers, wrong options."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, Qwen2_5_VLConfig, T5Config

import trl
from tests.architectures import config_of
from tests.harnesses.live_peak import SHAPES, live_peak, run_of, with_numbers
from trl.models.scoring.values import PolicyAndValue
from trl.models.setup import REWARD_MODEL
from trl.scripts.plan import METHODS, main, print_plan
from trl.scripts.planning import measure
from trl.scripts.planning import plan as planning
from trl.scripts.planning.live_bytes import Bytes
from trl.scripts.planning.plan import gathered_bytes, plan_of
from trl.scripts.planning.run import run_for
from trl.scripts.planning.state import sharding_of

SMALL = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip


# All pairs of shape and method: python -m tests.harnesses.live_peak. Their errors are below 4 %.
@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("sft", "half"),
        ("dpo", "kept"),
        ("grpo", "vocabulary"),
        ("reward", "wide"),
        ("gkd", "lora"),
        ("distillation", "deep"),
        ("rloo", "half"),
        ("online-dpo", "deep"),
        ("ppo", "deep"),
    ],
)
def test_a_plan_is_the_peak_of_a_step(method, name, tmp_path):
    run = run_of(method, SHAPES[name], str(tmp_path))
    assert plan_of(run).peak == pytest.approx(live_peak(run), rel=0.01)


@pytest.fixture(scope="module")
def run():
    """A run on one device, whose micro-batch is measured once."""
    return run_for("sft", ["--max_length", "32", "--per_device_train_batch_size", "2"], 1, config=SMALL)


@pytest.fixture(scope="module")
def alone(run):
    """Its plan."""
    return plan_of(run)


def test_state_is_counted_and_the_parts_add_up(alone):
    numbers = 2 * 512 * 64 + 64 + 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)
    assert alone.weights == numbers
    assert alone.gradients == 4 * numbers
    assert alone.parts["optimiser (adamw_torch_fused)"] == 8 * numbers
    assert alone.parts["weights"] == pytest.approx(4 * numbers, rel=1e-3)  # with buffers
    assert alone.peak == sum(alone.parts.values()) > 16 * numbers
    assert (alone.fits, alone.largest_batch, alone.levers) == (None, None, ())


def test_the_state_of_bfloat16_weights_has_their_residuals(run):
    plan = plan_of(replace(run.changed(weights="bf16+residual", bf16=False), phases=run.phases))
    assert plan.parts["optimiser (adamw_torch_fused with bf16 residuals)"] == (4 + 4 + 2) * plan.weights


def shared(run, profile, *, half=False):
    """The plan for four devices."""
    return plan_of(replace(run, sharding=sharding_of(str(profile), 4, half=half)))


@pytest.mark.parametrize(
    ("profile", "shares"),
    [("multi_gpu", (1, 1, 1)), ("zero1", (1, 1, 4)), ("zero2", (1, 4, 4)), ("fsdp2", (4, 4, 4)), ("zero3", (4, 4, 4))],
)
def test_devices_share_what_their_profile_says(run, alone, profile, shares):
    plan, state = shared(run, profile), "optimiser (adamw_torch_fused)"
    assert plan.parts["weights"] * shares[0] == alone.parts["weights"]
    assert plan.gradients * shares[1] == alone.gradients
    assert plan.parts[state] * shares[2] == alone.parts[state]
    assert ("DDP's buckets" in plan.parts) == (profile == "multi_gpu")


def test_deepspeed_keeps_float32_copies_beside_bfloat16_weights(run, alone):
    plan = shared(run, "zero2", half=True)
    assert plan.gradients == 2 * alone.weights / 4
    assert plan.parts["optimiser (adamw_torch_fused)"] == 12 * alone.weights / 4


LAYER, HEAD = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64, 512 * 64 + 64  # numbers; HEAD: with the last norm
NUMBERS = 3 * LAYER + 512 * 64 + HEAD
UNITS = {  # of SMALL in bfloat16, see gathered_bytes
    measure.FORWARD: 3 * 2 * LAYER,
    measure.HEAD: 2 * 2 * HEAD,
    measure.LAST_LAYER: 3 * 2 * LAYER + 2 * HEAD,
    measure.FIRST_LAYER: 4 * 2 * LAYER,
    measure.GENERATION: 2 * NUMBERS,
}


def test_fsdp_computes_with_units_in_bfloat16_and_keeps_no_other_copies():
    options = ["--max_length", "2", "--per_device_train_batch_size", "1", "--bf16", "true", "--use_cpu", "true"]
    autocast = run_for("sft", options, 4, config=SMALL)
    fsdp = run_for("sft", [*options, "--accelerate_config", "fsdp2"], 4, config=SMALL)
    plan = plan_of(fsdp)
    assert gathered_bytes(fsdp) == UNITS == gathered_bytes(replace(fsdp, sharding=sharding_of("fsdp2", 1, half=True)))
    assert plan.parts["gathered units"] == UNITS[plan.phase]
    copies = measure.phases_of(autocast)[measure.HEAD].others - measure.phases_of(fsdp)[measure.HEAD].others
    assert copies == pytest.approx(2 * (3 * (LAYER - 128) + HEAD - 64), rel=0.01)  # autocast's, of matrices


def test_fsdp_sums_whole_gradients_of_micro_batches():
    options = ["--bf16", "true", "--use_cpu", "true", "--gradient_accumulation_steps", "2"]
    run = run_for("sft", [*options, "--accelerate_config", "fsdp2"], 4, config=SMALL)
    run.phases[True] = {measure.HEAD: Bytes(2 * NUMBERS, 0.0)}  # in bfloat16
    plan = plan_of(run)
    assert (plan.parts["gradients"], plan.gradients) == (2 * NUMBERS, 4 * NUMBERS / 4)


def test_zero_3_keeps_gathered_what_deepspeed_allows_and_a_bucket(run, monkeypatch):
    plan = shared(run, "zero3")
    assert plan.parts["gathered units"] == 4 * plan.weights == plan.parts["DeepSpeed's bucket"]
    monkeypatch.setattr("trl.scripts.planning.plan._LIVE", 1000)
    monkeypatch.setattr("trl.scripts.planning.plan._BUCKET", 500)
    plan = shared(run, "zero3")
    assert (plan.parts["gathered units"], plan.parts["DeepSpeed's bucket"]) == (4000, 2000)


@pytest.mark.parametrize(
    ("kind", "settings", "offload"),
    [
        ("FSDP", "fsdp_config: {fsdp_version: 2, fsdp_offload_params: true}", "fsdp_offload_params: True"),
        (
            "DEEPSPEED",
            "deepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu}",
            "offload_optimizer_device: cpu",
        ),
    ],
)
def test_a_profile_that_offloads_is_refused(run, tmp_path, kind, settings, offload):
    file = tmp_path / "offload.yaml"
    file.write_text(f"distributed_type: {kind}\n{settings}\n")
    with pytest.raises(
        ValueError, match=f"accelerate_config has {offload}. CPU offloading is not planned: leave it out."
    ):
        shared(run, file)


@pytest.mark.parametrize(
    ("memory", "batch", "tokens"), [(99, 0, 0), (400, 10, 160), (1100, 38, 256), (10**9, 4096, 256)]
)
def test_the_largest_that_fit(run, alone, monkeypatch, memory, batch, tokens):
    def peak_of(run):
        work = run.rows * run.lengths.row // 4  # 8 for each row, 1 for 4 tokens of both rows
        sizes = {"a": 100 + work, "b": 25 * run.rows * run.lengths.row / 32 + 150, "c": 100}
        return replace(alone, phases=sizes, memory=run.memory)

    monkeypatch.setattr(planning, "plan_of", peak_of)
    plan = planning.planned(replace(run, memory=memory), levers=False)
    assert (plan.largest_batch, plan.largest_length) == (batch, tokens)


def test_rows_that_are_longer_than_the_context_are_said(run, caplog):
    planning.planned(run, levers=False)
    assert not caplog.text
    planning.planned(run.changed(max_length=300), levers=False)
    assert "rows of 300 tokens are longer than max_position_embeddings=256" in caplog.text


def test_each_lever_frees_what_its_setting_does(run, alone, monkeypatch):
    kept = run.changed(gradient_checkpointing=False)
    several = replace(kept, sharding=sharding_of(None, 2, half=False))
    settings = [setting for _, setting, _ in planning._changed(several)]
    assert settings[1:4] == ["--max_length 16", "--gradient_checkpointing true", "--weights bf16+residual"]
    assert settings[-3:] == [f"--accelerate_config {profile}" for profile in ("zero2", "fsdp2", "zero3")]
    name, setting = "gradient checkpointing", "--gradient_checkpointing true"
    monkeypatch.setattr(planning, "_changed", lambda _: [(name, setting, run), ("nothing", "", kept)])
    plan = plan_of(kept)
    assert planning.levers_of(plan, kept) == [(name, setting, plan.peak - alone.peak)]
    assert plan.peak > alone.peak


def test_vllm_in_the_same_process_takes_its_share_of_the_gpu():
    def plan(**settings):
        run = replace(run_for("grpo", ["--num_generations", "2", "--use_cpu", "true"], 1, config=SMALL), memory=1e9)
        run = run.changed(use_vllm=True, vllm_gpu_memory_utilization=0.25, **settings)
        run.phases[False] = {measure.HEAD: Bytes(0, 1e6), planning.UPDATE: Bytes(4 * NUMBERS, 0)}
        return plan_of(run)

    fixed, share = 12 * NUMBERS, pytest.approx(2.5e8)
    served, beside = plan(vllm_mode="server"), plan(vllm_mode="colocate")
    sleeping = plan(vllm_mode="colocate", vllm_enable_sleep_mode=True)
    assert beside.parts["vLLM (25% of the GPU)"] == share
    assert beside.peak - served.peak == share and measure.GENERATION not in served.phases
    assert sleeping.phases[measure.HEAD] == served.phases[measure.HEAD]
    assert sleeping.phase == measure.GENERATION
    assert sleeping.peak == pytest.approx(fixed + 2.5e8, rel=1e-4)  # with buffers
    with pytest.raises(ValueError, match=r"memory is missing: vLLM takes 25% of the GPU. Give its size, such as 80GB."):
        trl.plan(SMALL, method="grpo", use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.25)


def test_generation_holds_keys_and_values_logits_and_copies_of_the_matrices(monkeypatch):
    lengths = ["--max_prompt_length", "16", "--max_completion_length", "8"]
    rows = ["--num_generations", "2", "--per_device_train_batch_size", "4"]
    options = [*lengths, *rows, "--use_cpu", "true", "--bf16", "true"]
    run = run_for("grpo", options, 1, config=SMALL)
    tokens = 2 * 16 + 4 * 8  # two prompts are held once for two completions each
    keys_and_values = 2 * 3 * 2 * 16 * tokens * 2  # layers, heads of keys, their size, bfloat16
    logits, matrices = 4 * 512 * 3 * 4, 2 * (3 * (LAYER - 128) + 512 * 64)
    assert measure.phases_of(run)[measure.GENERATION] == (0, keys_and_values + logits + matrices)
    monkeypatch.setattr("trl.generation.transformers.decoders.LARGEST_COPIED", 2 * NUMBERS - 1)  # above two layers
    assert measure.phases_of(run.changed(seed=1))[measure.GENERATION] == (0, keys_and_values + logits)
    monkeypatch.undo()
    quantised = run_for("grpo", [*options, "--use_peft", "true", "--load_in_4bit", "true"], 1, config=SMALL)
    assert measure.phases_of(quantised)[measure.GENERATION] == (0, keys_and_values + logits)


# Bytes of a weight in blocks of 64 with a float32 scale; nested: of 8 bits, with a float32 scale for 256 of them.
@pytest.mark.parametrize(("nested", "byte"), [("false", 0.5 + 4 / 64), ("true", 0.5 + (1 + 4 / 256) / 64)])
def test_a_base_in_four_bits_has_dense_embeddings_head_and_adapters(nested, byte):
    lora = ["--use_peft", "true", "--lora_r", "8", "--lora_target_modules", "all-linear"]
    bits = ["--load_in_4bit", "true", "--use_bnb_nested_quant", nested]
    run = run_for("sft", [*lora, *bits, "--use_cpu", "true", "--bf16", "true"], 1, config=SMALL)
    adapters = 3 * 8 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    dense = 2 * (2 * 512 * 64 + adapters) + 4 * (7 * 64) + 4 * 16  # norms and two buffers of 8 angles in float32
    assert sum(run.kept.values()) + 4 * 16 == 3 * (LAYER - 128) * byte + dense
    assert sum(weight.numel() for weight in run.trained) == adapters
    run.phases[False] = {measure.HEAD: Bytes(0, 0)}
    assert plan_of(run).parts["activations and logits"] == 2 * 64 * 128  # the largest matrix is dense while it is used


def test_what_does_not_fit_is_printed(alone, capsys):
    plan = replace(alone, memory=2e6, largest_batch=0, largest_length=7)
    print_plan(replace(plan, sharding=sharding_of(None, 8, half=False)))
    out = capsys.readouterr().out
    assert "It does not fit in 1.9 MiB. The largest that fit, each with all else as it is:" in out
    assert "rows of a micro-batch on each GPU  not even one\n  tokens of a row                    7\n" in out
    assert "Micro-batches of 2 rows of 32 tokens on each GPU; " in out


@pytest.mark.parametrize("method", METHODS)
def test_the_batch_of_each_method_has_what_its_loss_reads(method):
    is_short = method in ("grpo", "rloo", "distillation", "online-dpo", "ppo")
    limits = ["--max_completion_length", "16", "--max_prompt_length", "16"] if is_short else ["--max_length", "32"]
    limits = ["--response_length", "16"] if method == "ppo" else limits
    groups = ["--num_generations", "4"] if method in ("grpo", "rloo") else []
    rows = ["--per_device_train_batch_size", "4", "--use_cpu", "true", "--use_peft", "true"]
    run = run_for(method, [*limits, *groups, *rows], 1, config=SMALL)
    assert run.samples == is_short
    model = with_numbers(SMALL, torch.float32, run.classifier)
    if method == "ppo":
        model = PolicyAndValue(model, with_numbers(SMALL, torch.float32, REWARD_MODEL))
    scorer, batch = measure.scorer_and_batch(run, model)
    measure.step(run.loss, batch, model, scorer, with_numbers(SMALL, torch.float32), nullcontext)
    assert batch["input_ids"].numel() >= 4 * (run.lengths.row if method in ("sft", "gkd") else 16)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_teacher_is_the_base_of_an_adapter_or_another_model(folder):
    options = ["--max_length", "32", "--per_device_train_batch_size", "2", "--use_cpu", "true", "--lmbda", "0"]
    options += ["--use_peft", "true"]
    base, beside = (
        plan_of(run_for("gkd", [*options, *teacher], 1, config=SMALL))
        for teacher in ([], ["--teacher_model_name_or_path", str(folder)])
    )
    assert "teacher" not in base.parts and beside.parts["teacher"] == 4 * NUMBERS


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gemma3_text"])
def test_architectures_of_today_are_planned(architecture):
    assert trl.plan(config_of(architecture), max_length=16, per_device_train_batch_size=1).peak > 0


def test_a_config_is_left_as_it_is():
    config = copy.deepcopy(SMALL)
    run = run_for("sft", ["--max_length", "16", "--weights", "bf16+residual"], 1, config=config)
    assert {weight.dtype for weight in run.kept} == {torch.bfloat16}
    assert config.to_dict() == SMALL.to_dict()


@pytest.fixture
def folder(tmp_path):
    """A folder with a config alone."""
    SMALL.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_command_reads_a_file_and_a_folder_without_weights(alone, folder, tmp_path, capsys, monkeypatch):
    phases = (*list(UNITS)[:4], planning.UPDATE)

    def stub(run):
        sizes = dict.fromkeys(phases, 1e4 * run.rows * run.lengths.row)
        return replace(alone, rows=run.rows, lengths=run.lengths, memory=run.memory, phases=sizes)

    monkeypatch.setattr(planning, "plan_of", stub)
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model_name_or_path: {folder}\ndataset_name: rows.jsonl\nmax_length: 32\nper_device_train_batch_size: 2\nbf16: true\n"
    )
    assert main(["sft", "--config", str(file), "--memory", "1GB", "--no_levers"]) == 0
    out = capsys.readouterr().out
    assert "2 rows of 32 tokens" in out and "It fits in" in out
    assert main(["sft", "--config", str(file), "--memory", "1 MB", "--no_levers"]) == 1
    out = capsys.readouterr().out
    assert "It does not fit in" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--memory 80", "memory must be a number with a unit (80GB, 24GiB), got '80'."),
        ("--memory 0GB", "memory must be a number with a unit (80GB, 24GiB), got '0GB'."),
        ("--gpus 0", "gpus must be at least 1, got 0."),
        ("--activation_offloading true", "activation_offloading is not planned. Leave it out."),
        ("--load_in_4bit true", "load_in_4bit needs an adapter"),
        ("--load_in_8bit true", "load_in_8bit is not planned. Leave it out."),
        ("--accelerate_config fsdp3", "accelerate_config must be a profile"),
        ("--max_lenght 3", "Unknown option --max_lenght. Did you mean --max_length?"),
        ("--model_name_or_path ./nowhere", "There is no folder './nowhere'."),
    ],
)
def test_wrong_options_are_one_line(line, message, folder, capsys):
    assert main(["sft", "--model_name_or_path", str(folder), *line.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("trl plan: error: ") and error.count("\n") == 1


def test_options_in_python_are_those_of_a_file(folder, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"model_name_or_path: {folder}\nmax_length: 512\n")
    rows = {"per_device_train_batch_size": 1, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    assert trl.plan(file, max_length=16, **rows).lengths.row == 16
    assert trl.plan(SMALL, max_length=None, **rows).lengths.row == SMALL.max_position_embeddings
    for settings in ({"optim": "nonsense"}, {"max_length": "long"}, {"max_lenght": 3}, {"memory": 80}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            trl.plan(SMALL, **settings)


@pytest.mark.parametrize("method", ["gkd", "distillation"])
def test_a_missing_teacher_is_said(method):
    with pytest.raises(ValueError, match="teacher_model_name_or_path is missing"):
        run_for(method, [], 1, config=SMALL)


@pytest.mark.parametrize("config", [Qwen2_5_VLConfig(), T5Config()])
def test_a_config_without_a_causal_model_is_said(config):
    with pytest.raises(ValueError, match=r"^\w+Config is of no causal model of transformers, and not planned"):
        trl.plan(config)


def test_a_missing_model_is_said(capsys):
    assert main(["sft"]) == 2
    assert "model_name_or_path is missing" in capsys.readouterr().err
    assert main(["--config", "run.yaml"]) == 2
    assert "method must be one of sft, " in capsys.readouterr().err
    assert main(["xpo", "--model_name_or_path", "model"]) == 2
    assert "got 'xpo'." in capsys.readouterr().err


@pytest.mark.parametrize(("text", "size"), [("80GB", 80e9), ("1.5 gib", 1.5 * 2**30), ("512MiB", 2**29)])
def test_sizes_are_read_with_their_unit(text, size):
    assert run_for("sft", [], 1, text, config=SMALL).memory == size
