#!/bin/sh
# Install with pip into an environment, and print a line a minute instead of hundreds.
# Usage: install.sh VENV ARGUMENTS-OF-PIP-INSTALL...
set -eu
venv=$1
shift

case " $* " in
  *" --no-deps "*) echo "installing torch into $venv" ;;
  *)
    if "$venv/bin/python" -c 'import torch' 2>/dev/null; then
      echo "installing into $venv"
    else
      echo "installing into $venv, once: about 3 GB with the CUDA build of torch, some 400 MB" \
        "with TORCH_INDEX=https://download.pytorch.org/whl/cpu"
    fi
    ;;
esac

log=$(mktemp)
"$venv/bin/python" -m pip install "$@" >"$log" 2>&1 &
pip=$!
trap 'kill "$pip" 2>/dev/null; rm -f "$log"; exit 130' INT TERM
minutes=0
seconds=0
while kill -0 "$pip" 2>/dev/null; do
  sleep 1
  seconds=$((seconds + 1))
  if [ "$seconds" -eq 60 ]; then
    seconds=0
    minutes=$((minutes + 1))
    size=$(du -sm "$venv" | cut -f1)
    echo "still installing after $minutes min, $size MB: $(tail -n 1 "$log" | cut -c1-100)"
  fi
done
code=0
wait "$pip" || code=$?
if [ "$code" -ne 0 ]; then
  cat "$log"
  echo "pip could not install baton; its last lines say why"
fi
rm -f "$log"
exit "$code"
