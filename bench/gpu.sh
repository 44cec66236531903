#!/usr/bin/env bash
# Everything that needs a GPU, in four calls of less than nine and a half minutes; results in the folder given.
#
#     bench/gpu.sh OUT RIGHT               kernels and whole steps against their references, memory checks, loads beside steps
#     bench/gpu.sh OUT SPEED               the machine, kernels, decode steps with adapters, kinds of kernels
#     bench/gpu.sh OUT WHERE               where the time of a step goes
#     bench/gpu.sh OUT LOADS               copies beside steps, CPU assistance, the live engine
#     bench/gpu.sh OUT CALL --cpu-smoke    the same code on a toy model, interpreted on the CPU: does the script work?
#     bench/gpu.sh OUT CALL --quick        two layers of the model, on the GPU: its kernels are compiled then
#
# On a machine with an NVIDIA GPU, torch, triton and transformers. Each call has a deadline of its own, writes what it has
# as it comes, and ends with a line that begins with VERDICT; its exit status is 0 only if that is good. What to expect
# stands in bench/results/predicted_steps.md and kernels_offline.md.
#
# Nothing is downloaded. PYTHON names the interpreter (python3 by default). What it lacks is installed into OUT from the
# folder bench/wheels, where there is one; for a machine with torch, triton, numba and transformers for Python 3.12:
#
#     pip download --no-deps --only-binary :all: --python-version 3.12 -d bench/wheels msgspec blake3 pytest pluggy iniconfig pygments hypothesis sortedcontainers
set -uo pipefail
usage="usage: bench/gpu.sh OUT RIGHT|SPEED|WHERE|LOADS [--cpu-smoke|--quick]"
out=${1:?$usage}
call=${2:?$usage}
mode=${3:-}
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONPATH="$PWD/src:$PWD/bench:$out/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

find_missing() {
    "$python" - <<'PY'
from importlib.util import find_spec
needed = ("torch", "triton", "numba", "transformers", "safetensors", "tokenizers", "msgspec", "blake3", "numpy", "scipy")
print(" ".join(name for name in (*needed, "jinja2", "pytest", "pluggy", "iniconfig", "pygments", "hypothesis", "sortedcontainers") if find_spec(name) is None))
PY
}

for name in $(find_missing); do
    if compgen -G "bench/wheels/$name-*.whl" >/dev/null; then
        "$python" -m pip install -q --no-index --no-deps --find-links bench/wheels --target "$out/site" "$name" 2>/dev/null
    fi
done
missing=$(find_missing | sed -E 's/ ?(pytest|pluggy|iniconfig|pygments|hypothesis|sortedcontainers)//g')
if [ -n "$missing" ]; then
    echo "missing: $missing; install them, or put their wheels into bench/wheels" | tee "$out/missing.txt"
    exit 1
fi

if [ "$mode" = --cpu-smoke ]; then
    export TRITON_INTERPRET=1
else
    nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.sm,clocks.mem --format=csv | tee "$out/machine.csv"
fi
timeout 560 "$python" bench/gpu.py --out "$out" --call "$call" "${@:3}"
status=$?
if [ $status -eq 124 ]; then
    echo "VERDICT $call: NOT GOOD; stopped after its time, and what was measured until then is in $out"
fi
exit $status
