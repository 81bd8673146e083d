#!/usr/bin/env bash
# The kernels' tests once more, every launch executed from Triton's own IR by ttsem, which finds lanes out of bounds and
# races by other means than tests/interpreter.py. It needs a newer Triton than the tests', so an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

env=.venv-ttsem
if [ ! -x "$env/bin/pytest" ]; then
    python3 -m venv "$env"
    "$env/bin/pip" install -q torch==2.13.0 triton==3.8.0 numpy ml_dtypes pytest hypothesis gguf safetensors rich typer
    "$env/bin/pip" install -q --ignore-requires-python --no-deps ttsem==0.1.0
fi
# left out: tiles that only an interpreter takes, a weight of 2 GiB in sparse memory, and what is refused, since here
# every tensor says that it is on one GPU
PYTHONPATH=. exec "$env/bin/python" -m ttsem.sanitize pytest -p no:cacheprovider -m "not aot and not slow" \
    -k "not no_worse_than_torch and not offsets_past and not device and not infinities and not refuse and not fault" \
    tests/test_{fused,qgemm,qmatmul,w8a8,pages,attention_tile}.py "$@"
