#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
##SBATCH --gpus-per-node=4
# Start it with: sbatch job.sh --steps 10000 --checkpoint FOLDER
# All nodes must see the folder. For GPUs, write #SBATCH for ##SBATCH above.
set -euo pipefail
ranks=${SLURM_GPUS_ON_NODE:-2}  # on each node: one for each GPU, or 2
cpus=${SLURM_CPUS_PER_TASK:-$ranks}
source "${VENV:-.venv}/bin/activate"
mkdir -p logs

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # a fresh store for each restart
export OMP_NUM_THREADS=$((cpus > ranks ? cpus / ranks : 1))
# export NCCL_DEBUG=INFO NCCL_DEBUG_FILE="logs/nccl-%h-%p.txt"  # what nccl chose, and why it failed
# export NCCL_SOCKET_IFNAME=eth0   # the network to meet on, if nccl takes the wrong one
# export NCCL_IB_HCA=mlx5          # the InfiniBand cards to use
# export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1  # Flight Recorder
# export TORCH_FR_DUMP_TEMP_FILE="$PWD/logs/flight_recorder_"    # its files, one for each rank

# Slurm sends USR1 two minutes before the time is over. The ranks save and end; the job queues again.
again= running=
trap 'again=yes; kill -USR1 $running || true' USR1
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpus-per-task "$cpus" torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --rdzv-endpoint "$host:$((20000 + SLURM_JOB_ID % 10000))" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 90 \
    --log-dir "logs/$SLURM_JOB_ID" --tee 3 \
    train.py "$@" &
running=$!
code=0
wait "$running" || code=$?
if [ "$again" ]; then
    wait "$running" || true  # the first wait ended with the signal
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
