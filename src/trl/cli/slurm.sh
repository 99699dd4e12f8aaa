#!/bin/bash
# Written by `trl {{ name }} --launch slurm`. To go on after the job has ended: sbatch {{ folder }}/job.sh
#SBATCH --job-name={{ job }}
#SBATCH --nodes={{ nodes + vllm_nodes }}
#SBATCH --ntasks-per-node=1
{% if gpus -%}
#SBATCH --gpus-per-node={{ gpus }}
{% endif -%}
#SBATCH --output={{ folder }}/%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@300
{% for option in sbatch -%}
#SBATCH {{ option }}
{% endfor %}
set -euo pipefail
cd {{ here }}
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
export MAIN=${nodes[0]} PORT=$((20000 + SLURM_JOB_ID % 20000))
log={{ folder }}/$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
{% if vllm_nodes %}
export TRL_VLLM_SERVER_TOKEN=$(openssl rand -hex 32)
export SERVER=${nodes[{{ nodes }}]}
srun --nodes=1 --ntasks=1 --nodelist="$SERVER" --output="$log.vllm.log" \
    {{ trl }} vllm-serve --model {{ model }} --host 0.0.0.0 --tensor_parallel_size {{ gpus }} &
trap "kill $! || true" EXIT
{% endif %}
# Each attempt goes on from the newest checkpoint. A process that fails ends those of the other machines.
srun --nodes={{ nodes }} --ntasks={{ nodes }} --nodelist="$(IFS=,; echo "${nodes[*]:0:{{ nodes }}}")" \
    --kill-on-bad-exit=1 --wait=60 --output="$log.%t.log" bash -c 'exec "$@" --machine_rank "$SLURM_PROCID"' node \
    {{ trl }} {{ name }} {{ words }} \
    --num_machines {{ nodes }} --num_processes {{ nodes * per_node }} --main_process_ip "$MAIN" --main_process_port "$PORT"{% if vllm_nodes %} \
    --use_vllm true --vllm_mode server --vllm_server_host "$SERVER" --vllm_server_timeout 900{% endif %}
