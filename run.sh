#!/bin/bash
# One H200, about 80 s. Host time first, then decode.
# Predicted: hopper without gradient 33 -> about 17 us, with gradient 77 -> about 50; two launches are 8 of these.
# Predicted: edges of a window 3 to 8 us, more for the first kernel of a chain with programmatic launches; merging in
# the kernel and chaining save 1 to 3 us a call of 67.
set -u
export PYTHONPATH=.:kernels:tests
OUT=${OUT:-/tmp}
timeout 60 python3 -m pytest -q -x -p no:cacheprovider tests/mta_kernels/test_repeated.py tests/mta_kernels/test_cuda.py 2>&1 | tail -3
timeout 90 python3 scripts/host_time.py --batches 1 > /dev/null 2>>"$OUT/warm.txt" &  # compile everything first, side by side
timeout 90 python3 experiment/host_breakdown.py 1 > /dev/null 2>>"$OUT/warm.txt" &
for d in 64 128; do
  for name in "now" "no pdl" "chain early" "chain late" "merge, no pdl" "merge, chain early" "merge, chain late"; do
    timeout 60 python3 experiment/decode_experiment.py warm "$name" $d > /dev/null 2>>"$OUT/warm.txt" &
  done
done
wait
tail -3 "$OUT/warm.txt"
timeout 60 python3 scripts/host_time.py --batches 120 --out "$OUT/host-time.csv" 2>&1
timeout 60 python3 experiment/host_breakdown.py 150 2>&1 | tee "$OUT/host-breakdown.txt"
for d in 64 128; do
  timeout 60 python3 experiment/decode_experiment.py measure $d "$OUT/decode-$d.csv" 2>&1 | tee "$OUT/decode-$d.txt"
done
