#!/bin/bash
#SBATCH --job-name=baton-small-router
#SBATCH --output="FOLDER/logs/router.job.log"
#SBATCH --open-mode=append
#SBATCH --signal=TERM@40
#SBATCH --nodes=1
#SBATCH --ntasks=2
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

echo "$OWN_ADDRESS" >"$folder/routers.new" &&
  mv "$folder/routers.new" "$folder/routers"

export PYTHONUNBUFFERED=1 OWN_ADDRESS
srun --kill-on-bad-exit=1 \
  PYTHON -m baton.deploy.cluster.platforms.slurm "$folder" router
