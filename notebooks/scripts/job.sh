#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out
##SBATCH --gpus-per-node=4

# Start it with: sbatch job.sh --epochs 10 --checkpoint FOLDER
# All nodes must see the folder. For GPUs, write #SBATCH for ##SBATCH above.
ranks=${SLURM_GPUS_ON_NODE:-2}  # on each node: one for each GPU, or 2
source "${VENV:-.venv}/bin/activate"

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # a fresh store for each restart
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / ranks))
srun --cpus-per-task "$SLURM_CPUS_PER_TASK" torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$host:$port" \
    train.py "$@"
