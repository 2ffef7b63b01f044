#!/usr/bin/env bash
# Everything that needs a GPU, in one run: correctness, calibration, the same trace modelled and run.
#
#   tools/gpu.sh [FOLDER]            results go to FOLDER (default: gpu-results)
#   DRY=1 tools/gpu.sh [FOLDER]      the same steps, small, on a CPU: shows that the script runs
#   PYTHON=...                       the interpreter; needs torch >= 2.11, triton 3.6 and prefixlab's
#                                    own dependencies (pip install -e '.[executor]' pytest)
#
# A step that fails is reported and the next one runs. Each has a limit; all together stay within
# about eleven minutes, calibration within eight. What comes back is FOLDER: log.txt, summary.txt,
# env.txt, two profiles, scan.json.
set -u -o pipefail
cd "$(dirname "$0")/.."
OUT=${1:-gpu-results}
PYTHON=${PYTHON:-python3}
DRY=${DRY:-}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$OUT"
LOG="$OUT/log.txt"
SUMMARY="$OUT/summary.txt"
: > "$LOG"
: > "$SUMMARY"

# step NAME SECONDS COMMAND...: runs it with a limit, keeps its output, notes how it went
step() {
  local name=$1 limit=$2 start=$SECONDS rc
  shift 2
  echo "== $name: $*" | tee -a "$LOG"
  timeout "$limit" "$@" 2>&1 | tee -a "$LOG"
  rc=${PIPESTATUS[0]}
  printf '%-24s rc %s, %s s\n' "$name" "$rc" "$((SECONDS - start))" | tee -a "$SUMMARY"
}

cli() { local name=$1 limit=$2; shift 2
  step "$name" "$limit" "$PYTHON" -c 'from experiments.cli import main; main()' "$@"; }

if [ -n "$DRY" ]; then
  DEVICE=cpu SMALL=(--small) MODEL=nano BIG=(--model nano --grid coarse --rounds 1 --repeats 1)
  TIMES=(--grid coarse --rounds 1 --repeats 1)
else
  DEVICE=cuda SMALL=() MODEL=tiny TIMES=(--grid full --rounds 2 --repeats 5 --budget-s 120)
  # Eleven of Nemotron-H-8B's 52 layers and its output layer: the same shapes, less to draw.
  BIG=(--model nemotron-h-8b --pattern "M-M-M*-M-M-" --graph --block-tokens 16 --grid full
       --rounds 1 --repeats 5 --budget-s 240)
fi

{
  date -u
  "$PYTHON" -VV
  "$PYTHON" -c 'import torch, numpy; print("torch", torch.__version__, "numpy", numpy.__version__)'
  "$PYTHON" -c 'import triton; print("triton", triton.__version__)'
  nvidia-smi
  git rev-parse HEAD
} > "$OUT/env.txt" 2>&1

# 1. Correctness: every kernel at full size against torch on the same device; equal runs, equal bits.
step kernels 150 "$PYTHON" -m pytest -q -rs tests/test_kernels_gpu.py
# 2. The executor's own checks, where its commands are there: reuse gives what a full prefill gives.
cli verify 120 verify --device "$DEVICE" --model "$MODEL" --traces 1
# 3. Calibration, launched one by one (what the executor does) and from graphs (what engines do).
cli "calibrate $MODEL" 180 calibrate --device "$DEVICE" --model "$MODEL" "${TIMES[@]}" --rates \
  --out "$OUT/$DEVICE-$MODEL.json"
cli "calibrate 8B" 330 calibrate --device "$DEVICE" "${BIG[@]}" --rates --no-compare \
  --out "$OUT/$DEVICE-large.json"
# 4. The scan beside other libraries'.
step scan 90 "$PYTHON" tools/gpu_compare.py --device "$DEVICE" "${SMALL[@]}" --json "$OUT/scan.json"
# 5. One trace, modelled with the profile of this run and executed.
cli validate 120 validate --device "$DEVICE" --model "$MODEL" --profile "$OUT/$DEVICE-$MODEL.json"

echo
cat "$SUMMARY"
