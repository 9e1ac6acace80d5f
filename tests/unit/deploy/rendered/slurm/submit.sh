#!/bin/bash
cd FOLDER/out || exit 1
rm -rf routers jobs
job=$(sbatch --parsable router.sh) || exit 1
echo "${job%%;*}" >>jobs; echo "router: job ${job%%;*}"
job=$(sbatch --parsable prefill.sh) || exit 1
echo "${job%%;*}" >>jobs; echo "prefill: job ${job%%;*}"
job=$(sbatch --parsable decode.sh) || exit 1
echo "${job%%;*}" >>jobs; echo "decode: job ${job%%;*}"
