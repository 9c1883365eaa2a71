#!/usr/bin/env bash
# Speed on the device at hand, in at most 8 minutes: plain and speculative decoding at T5's shapes, beside Transformers
# where it is installed.
#
#   experiments/device_check.sh [FOLDER FOR WHAT IT WRITES]
#
# On a GPU or TPU a T5-XXL-shaped target in bfloat16, made on the device, with drafts of three sizes
# (configs/runs/device_check.gin); on a CPU the same steps at small shapes (configs/runs/device_check_cpu.gin).
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:-results/device_check}
backend=$(python -c 'import jax; print(jax.default_backend())')
config=device_check
case $backend in
  cpu) config=device_check_cpu ;;
  gpu)
    # Rounds are launched from the device: a while loop and what is in it become one CUDA graph, however short.
    export XLA_FLAGS="${XLA_FLAGS:---xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL --xla_gpu_graph_min_graph_size=1}"
    export XLA_PYTHON_CLIENT_PREALLOCATE=false  # PyTorch needs memory beside
    nvidia-smi || true ;;
esac
timeout 480 python -m experiments.benchmark --gin_file="configs/runs/$config.gin" --output_dir="$output"
