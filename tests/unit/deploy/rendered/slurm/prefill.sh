#!/bin/bash
#SBATCH --job-name=baton-small-prefill
#SBATCH --output="FOLDER/logs/prefill-%a.job.log"
#SBATCH --open-mode=append
#SBATCH --signal=TERM@40
#SBATCH --array=0-0
#SBATCH --nodes=1
#SBATCH --ntasks=2
#SBATCH --mem=4096M
#SBATCH --gres=gpu:2
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
srun --kill-on-bad-exit=1 \
  PYTHON -m baton.deploy.cluster.platforms.slurm "$folder" prefill
