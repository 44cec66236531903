#!/usr/bin/env bash
# Everything that needs a GPU, in one call of less than nine minutes; results in the folder given.
#
#     bench/gpu.sh OUT               on a machine with an NVIDIA GPU, torch, triton and transformers
#     bench/gpu.sh OUT --cpu-smoke   the same code on a toy model, interpreted on the CPU: does the script work?
#
# Nothing is downloaded. PYTHON names the interpreter (python3 by default). What it lacks is installed into OUT from the
# folder bench/wheels, where there is one; for a machine with torch, triton, numba and transformers for Python 3.12:
#
#     pip download --no-deps --only-binary :all: --python-version 3.12 -d bench/wheels msgspec blake3 pytest pluggy iniconfig pygments
set -uo pipefail
out=${1:?usage: bench/gpu.sh OUT [--cpu-smoke]}
mode=${2:-}
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONPATH="$PWD/src:$PWD/bench:$out/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

find_missing() {
    "$python" - <<'PY'
from importlib.util import find_spec
needed = ("torch", "triton", "numba", "transformers", "safetensors", "tokenizers", "msgspec", "blake3", "numpy", "scipy")
print(" ".join(name for name in (*needed, "jinja2", "pytest", "pluggy", "iniconfig", "pygments") if find_spec(name) is None))
PY
}

for name in $(find_missing); do
    if compgen -G "bench/wheels/$name-*.whl" >/dev/null; then
        "$python" -m pip install -q --no-index --no-deps --find-links bench/wheels --target "$out/site" "$name" 2>/dev/null
    fi
done
missing=$(find_missing | sed -E 's/ ?(pytest|pluggy|iniconfig|pygments)//g')
if [ -n "$missing" ]; then
    echo "missing: $missing; install them, or put their wheels into bench/wheels" | tee "$out/missing.txt"
    exit 1
fi

if [ "$mode" = --cpu-smoke ]; then
    export TRITON_INTERPRET=1
    exec "$python" bench/gpu.py --out "$out" "${@:2}"
fi
nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.sm,clocks.mem --format=csv | tee "$out/machine.csv"

# First of all: right. The tests of the kernels run on the GPU where there is one.
if "$python" -c "import pytest" 2>/dev/null; then
    # Each shape is compiled first: several at a time where that can be.
    parallel=$("$python" -c "import xdist; print('-n 8')" 2>/dev/null)
    # shellcheck disable=SC2086
    timeout 150 "$python" -m pytest -q $parallel -p no:cacheprovider -o addopts= -o filterwarnings=default -o timeout=0 \
        tests/execution/lora/test_triton_lora.py tests/execution/attention/test_triton_attention.py \
        tests/execution/kernels/test_row_weight.py tests/execution/fusion/test_triton_norm.py tests/execution/fusion/test_triton_gate.py tests/execution/fusion/test_triton_fused.py \
        tests/execution/assist/test_assist_cuda.py tests/execution/model/test_device_memory.py >"$out/kernel_tests.txt" 2>&1
    tail -n 15 "$out/kernel_tests.txt"
else
    echo "pytest is missing: kernels were not compared with their reference" | tee "$out/kernel_tests.txt"
fi
timeout 380 "$python" bench/gpu.py --out "$out" --minutes 5.5
status=$?
[ $status -eq 124 ] && echo "stopped after its time; what was measured until then is in $out"
exit $status
