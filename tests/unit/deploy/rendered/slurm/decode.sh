#!/bin/bash
#SBATCH --job-name=baton-small-decode
#SBATCH --output="FOLDER/logs/decode-%a.job.log"
#SBATCH --open-mode=append
#SBATCH --signal=TERM@40
#SBATCH --array=0-2
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=2
#SBATCH --requeue
#SBATCH --partition=gpus
#SBATCH --account=lab
#SBATCH --time=2-00
#SBATCH --qos=high
set -u
umask 077
folder=FOLDER/out

OWN_ADDRESS=$(scontrol show node --oneliner "$SLURMD_NODENAME" |
  sed -n "s/.* NodeAddr=\([^ ]*\).*/\1/p")

export PYTHONUNBUFFERED=1 OWN_ADDRESS
srun --kill-on-bad-exit=1 --cpus-per-task=2 \
  PYTHON -m baton.deploy.cluster.platforms.slurm "$folder" decode
