#!/usr/bin/env bash
# sbatch configs/ray/slurm.sh STUDY OUT      (a template: untried on a real Slurm)
# One Ray node a Slurm node; the study's driver runs beside the head, in the first of them.
#SBATCH --job-name=shadow-engine
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --signal=B:TERM@120
set -euo pipefail
study=${1:?study} out=${2:?absolute output folder}
[[ $out == /* ]] || { echo "OUT must be an absolute path" >&2 && exit 2; }

# The token stays in the environment, which srun passes on: nothing is written to disk.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(openssl rand -hex 32)
export RAY_AUTH_TOKEN
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts[0]} port=6379
start=(ray start --block --disable-usage-stats --num-cpus "$SLURM_CPUS_PER_TASK")

srun --nodes=1 --ntasks=1 -w "$head" "${start[@]}" --head --port "$port" &
for _ in {1..60}; do
  (exec 3<>"/dev/tcp/$head/$port") 2>/dev/null && break
  sleep 2
done
for host in "${hosts[@]:1}"; do
  srun --nodes=1 --ntasks=1 -w "$host" "${start[@]}" --address "$head:$port" &
done
trap 'kill -TERM "$driver"' TERM # two minutes before the limit: stop in order, keep what is finished
srun --overlap --nodes=1 --ntasks=1 -w "$head" \
  python -m engine run --study "$study" --executor ray --address "$head:$port" --out "$out" &
driver=$!
wait "$driver"
