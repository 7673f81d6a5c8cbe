#!/usr/bin/env bash
# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

# Checks the GPU attention on this machine's NVIDIA GPU and times it; without one it exits with 1.
#     PYTHON=python bash benchmarks/gpu.sh [arguments of gpu.py]
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v nvidia-smi > /dev/null || ! nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; then
    echo "benchmarks/gpu.sh: there is no NVIDIA GPU here." >&2
    exit 1
fi
PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python}" benchmarks/gpu.py "$@"
