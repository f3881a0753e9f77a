#!/usr/bin/env bash
# The fast paths and both workers on one NVIDIA GPU, in under 8 minutes; `bash benchmarks/gpu.sh --help` tells the rest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
LIMIT_S=480 # gpu.py keeps a shorter budget of its own; this is for a hang of that very process

usage() {
  cat <<'TEXT'
bash benchmarks/gpu.sh               on the first GPU: tests, both workers, rates and memory; nothing is downloaded
bash benchmarks/gpu.sh --cpu         the same road with a tiny model on the CPU, under a minute; its figures mean nothing
  --out FILE                         the figures as JSON as well
  --steps N                          optimizer steps of the run (default 5; the first one is left out of the rates)
  --only tests,probe,workers         some of the parts

What it needs: the project's requirements with a CUDA build of torch, in .venv or in the Python that PYTHON names:

  sed -i 's/^torch==.*/torch==2.13.0/' requirements.txt     # the default index has the CUDA build for Linux
  python3.12 -m venv .venv && .venv/bin/pip install -r requirements-dev.txt
  bash benchmarks/gpu.sh --out gpu.json

24 GiB of GPU memory, 8 GiB of memory and 7 GB of disk in TMPDIR are enough. CUDA_VISIBLE_DEVICES chooses another GPU.
Exit codes: 0 all checks passed, 1 one failed (its last lines are shown), 2 no GPU, no CUDA torch or a requirement missing.
TEXT
}

for flag in "$@"; do
  case "$flag" in -h | --help)
    usage
    exit 0
    ;;
  esac
done

python=${PYTHON:-.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
if ! command -v "$python" >/dev/null; then
  echo "gpu.sh: no Python: neither .venv/bin/python nor python3 is there; set PYTHON=/path/to/python" >&2
  exit 2
fi
missing=$("$python" -c 'import importlib.util as u
names = ("torch", "transformers", "peft", "deepspeed", "tokenizers", "safetensors", "zmq", "psutil", "pytest")
print(*(n for n in names if u.find_spec(n) is None))') || exit 2
if [ -n "$missing" ]; then
  echo "gpu.sh: $python lacks: $missing. Install requirements-dev.txt there, or set PYTHON; --help shows how" >&2
  exit 2
fi
code=0
timeout --foreground --kill-after=15 "$LIMIT_S" "$python" benchmarks/gpu.py "$@" || code=$?
if [ "$code" = 124 ] || [ "$code" = 137 ]; then
  echo "gpu.sh: ended after $LIMIT_S s, which is a failure: some part did not keep its own limit" >&2
  code=1
fi
exit "$code"
