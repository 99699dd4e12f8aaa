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
{% macro on_gpus(places) %}{% if vllm_gpus %}export CUDA_VISIBLE_DEVICES=$(cut -d, -f{{ places }} <<< "${CUDA_VISIBLE_DEVICES:?SLURM did not set it: use --vllm_nodes 1}"); {% endif %}{% endmacro -%}
{% if vllm_nodes or vllm_gpus %}
export TRL_VLLM_SERVER_TOKEN=$(openssl rand -hex 32)
export SERVER=${nodes[{{ nodes if vllm_nodes else 0 }}]}
srun --nodes=1 --ntasks=1 --overlap --nodelist="$SERVER" --output="$log.vllm.log" \
    bash -c '{{ on_gpus("%d-" % (per_node + 1)) }}exec "$@"' node \
    {{ trl }} vllm-serve --model {{ model }} --host 0.0.0.0 --tensor_parallel_size {{ vllm_gpus or gpus }} &
trap "kill $! || true" EXIT
{% endif %}
# Each attempt goes on from the newest checkpoint. A process that fails ends those of the other machines.
srun --nodes={{ nodes }} --ntasks={{ nodes }} --overlap --nodelist="$(IFS=,; echo "${nodes[*]:0:{{ nodes }}}")" \
    --kill-on-bad-exit=1 --wait=60 --output="$log.%t.log" bash -c '{{ on_gpus("-%d" % per_node) }}exec "$@" --machine_rank "$SLURM_PROCID"' node \
    {{ trl }} {{ name }} {{ words }} \
    --num_machines {{ nodes }} --num_processes {{ nodes * per_node }} --main_process_ip "$MAIN" --main_process_port "$PORT"{% if vllm_nodes or vllm_gpus %} \
    --use_vllm true --vllm_mode server --vllm_server_host "$SERVER" --vllm_server_timeout 900{% endif %}
