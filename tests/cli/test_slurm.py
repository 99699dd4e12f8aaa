"""`--launch slurm`: what the job runs on each machine, by stand-ins of SLURM's programs that start local processes."""

import json
import os
import sys

import pytest
import yaml

from trl.cli.main import main

# Two "machines" are local processes; their output goes where srun's would.
SRUN = """#!{python}
import os, subprocess, sys
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
start = next(place for place, word in enumerate(sys.argv[1:], 1) if not word.startswith("--"))
running = []
for rank in range(int(options["ntasks"])):
    log = open(options["output"].replace("%t", str(rank)), "w")
    env = os.environ | {{"SLURM_PROCID": str(rank), "NODELIST": options["nodelist"], "KILLS": options.get("kill-on-bad-exit", "0")}}
    running.append(subprocess.Popen(sys.argv[start:], env=env, stdout=log, stderr=log))
sys.exit(max(process.wait() for process in running))
"""
PROGRAMS = {
    "srun": SRUN,
    "sbatch": '#!/bin/bash\nSLURM_JOB_ID=7 SLURM_JOB_NODELIST="n[0-2]" exec bash "$1"\n',
    "scontrol": "#!/bin/bash\necho node-a\necho node-b\necho node-c\n",
    "trainer": """#!{python}
import json, os, sys, time
until = time.monotonic() + 60
while os.environ.get("TRL_VLLM_SERVER_TOKEN") and sys.argv[3] != "vllm-serve" and time.monotonic() < until:
    if os.path.exists(os.environ["SEEN"]) and "vllm-serve" in open(os.environ["SEEN"]).read():
        break  # a training waits for its server
    time.sleep(0.05)
names = ("SLURM_PROCID", "NODELIST", "KILLS", "TRL_VLLM_SERVER_TOKEN", "CUDA_VISIBLE_DEVICES")
line = json.dumps({{"words": sys.argv[3:], **{{name: os.environ.get(name) for name in names}}}})
open(os.environ["SEEN"], "a").write(line + "\\n")
""",
}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Programs of SLURM on the path, and what was run on the machines."""
    folder, seen = tmp_path / "bin", tmp_path / "seen.jsonl"
    folder.mkdir()
    for name, text in PROGRAMS.items():
        (folder / name).write_text(text.format(python=sys.executable) if "{python}" in text else text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(seen))
    monkeypatch.setattr(sys, "executable", str(folder / "trainer"))
    monkeypatch.chdir(tmp_path)
    return lambda: sorted(map(json.loads, seen.read_text().splitlines()), key=lambda entry: entry["SLURM_PROCID"])


def value(words, name):
    return words[words.index(f"--{name}") + 1]


def test_two_machines_train_one_run(cluster, tmp_path, capfd):
    config = tmp_path / "run.yaml"
    config.write_text("env: {NCCL_DEBUG: WARN}\nlaunch: slurm\nnodes: 2\nlearning_rate: 2.0e-5\nmax_steps: 3\n")
    line = ["--model_name_or_path", "a model", "--dataset_name", "rows", "--output_dir", "out"]
    assert main(["sft", "--config", str(config), *line, "--sbatch=--partition=h100 --time=1:00:00"]) == 0
    first, second = (entry["words"] for entry in cluster())
    assert first[:3] == ["sft", "--config", str(tmp_path / "out" / "slurm" / "config.yaml")]
    assert first[3:9] == line
    assert first[:-1] == second[:-1] and (first[-1], second[-1]) == ("0", "1") and first[-2] == "--machine_rank"
    options = {
        name: value(first, name) for name in ("num_machines", "num_processes", "main_process_ip", "main_process_port")
    }
    assert options == {
        "num_machines": "2",
        "num_processes": "16",
        "main_process_ip": "node-a",
        "main_process_port": "20007",
    }
    assert (value(first, "accelerate_config"), value(first, "resume_from_checkpoint")) == ("multi_gpu", "true")
    assert cluster()[0]["NODELIST"] == "node-a,node-b" and cluster()[0]["KILLS"] == "1"
    settings = yaml.safe_load((tmp_path / "out/slurm/config.yaml").read_text())
    assert settings == {"learning_rate": 2e-5, "max_steps": 3, "env": {"NCCL_DEBUG": "WARN"}}
    job = (tmp_path / "out/slurm/job.sh").read_text().splitlines()
    asked = [text.removeprefix("#SBATCH --") for text in job if text.startswith("#SBATCH")]
    assert asked[:4] == ["job-name=trl-sft", "nodes=2", "ntasks-per-node=1", "gpus-per-node=8"]
    assert asked[-2:] == ["partition=h100", "time=1:00:00"] and "requeue" in asked
    assert {path.name for path in (tmp_path / "out/slurm").glob("7.*")} == {"7.0.0.log", "7.0.1.log"}


def test_one_machine_serves_the_model(cluster, tmp_path):
    line = ["--model_name_or_path", "m", "--dataset_name", "rows", "--output_dir", "out", "--reward_funcs", "length"]
    assert (
        main(["grpo", *line, "--launch", "slurm", "--nodes", "2", "--vllm_nodes", "1", "--accelerate_config", "fsdp2"])
        == 0
    )
    entries = cluster()
    (served,) = (entry for entry in entries if entry["words"][0] == "vllm-serve")
    trained = [entry for entry in entries if entry["words"][0] == "grpo"]
    assert served["words"] == ["vllm-serve", "--model", "m", "--host", "0.0.0.0", "--tensor_parallel_size", "8"]
    assert served["NODELIST"] == "node-c" and [entry["NODELIST"] for entry in trained] == ["node-a,node-b"] * 2
    assert (
        len({entry["TRL_VLLM_SERVER_TOKEN"] for entry in entries}) == 1 and len(served["TRL_VLLM_SERVER_TOKEN"]) == 64
    )
    words = trained[0]["words"]
    assert (value(words, "vllm_server_host"), value(words, "accelerate_config")) == ("node-c", "fsdp2")
    assert words.count("--accelerate_config") == 1


def test_some_gpus_of_the_machine_serve_the_model(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")  # as SLURM sets it
    line = ["--model_name_or_path", "m", "--dataset_name", "rows", "--output_dir", "out", "--reward_funcs", "length"]
    assert main(["grpo", *line, "--launch", "slurm", "--vllm_gpus", "2"]) == 0
    served, trained = sorted(cluster(), key=lambda entry: entry["words"][0], reverse=True)
    assert served["words"] == ["vllm-serve", "--model", "m", "--host", "0.0.0.0", "--tensor_parallel_size", "2"]
    assert (served["CUDA_VISIBLE_DEVICES"], trained["CUDA_VISIBLE_DEVICES"]) == ("6,7", "0,1,2,3,4,5")
    assert served["NODELIST"] == trained["NODELIST"] == "node-a"
    words = trained["words"]
    assert (value(words, "num_processes"), value(words, "vllm_server_host")) == ("6", "node-a")
    assert "#SBATCH --nodes=1\n" in (tmp_path / "out/slurm/job.sh").read_text()


def test_a_single_option_of_sbatch(cluster, tmp_path):
    line = [
        "--launch",
        "slurm",
        "--output_dir",
        str(tmp_path / "o"),
        "--dry_run",
        "true",
        "--sbatch",
        "--partition=h100",
    ]
    assert main(["sft", *line]) == 0
    assert "#SBATCH --partition=h100\n" in (tmp_path / "o/slurm/job.sh").read_text()


def test_a_dry_run_writes_the_job_alone(cluster, tmp_path, capsys):
    line = [
        "--launch",
        "slurm",
        "--gpus_per_node",
        "0",
        "--output_dir",
        str(tmp_path / "o"),
        "--dry_run",
        "--max_steps=2",
    ]
    assert main(["sft", *line, "--resume_from_checkpoint", "false"]) == 0
    assert "nothing was submitted" in capsys.readouterr().out
    job = (tmp_path / "o/slurm/job.sh").read_text()
    assert (
        "--accelerate_config cpu" in job
        and "--num_processes 1" in job
        and "gpus-per-node" not in job
        and "--dry" not in job
    )
    assert job.count("resume_from_checkpoint") == 1 and not (tmp_path / "seen.jsonl").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["sft", "--max_steps", "1"], "--launch slurm needs --output_dir"),
        (["sft", "--output_dir", "o", "--num_processes", "4"], "sets num_processes by itself. Leave it out"),
        (["sft", "--output_dir", "o", "--nodes", "0"], "nodes must be from 1 to 10000, got 0"),
        (["sft", "--output_dir", "o", "--vllm_nodes", "1"], "trl sft does not generate. Leave vllm_nodes out."),
        (
            ["grpo", "--output_dir", "o", "--model_name_or_path", "m", "--vllm_gpus", "8"],
            "less than gpus_per_node=8 of one machine, got 8",
        ),
        (
            ["grpo", "--output_dir", "o", "--model_name_or_path", "m", "--vllm_gpus", "1", "--nodes", "2"],
            "with nodes=2",
        ),
        (["grpo", "--output_dir", "o", "--vllm_nodes", "1"], "vllm_nodes needs --model_name_or_path"),
        (["sft", "--output_dir", "o", "--max_stepps", "4"], "Did you mean --max_steps?"),
    ],
)
def test_what_cannot_be_submitted_is_one_message(line, message, cluster, tmp_path, capsys):
    assert main([*line, "--launch", "slurm"]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "o").exists()


def test_without_sbatch_the_job_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["sft", "--launch", "slurm", "--output_dir", str(tmp_path / "o")]) == 2
    assert f"On a login node: sbatch {tmp_path}/o/slurm/job.sh" in capsys.readouterr().err
