# One H200, 240 seconds. Predicted: forward.cu 2.55 ms at 16384 (1.00); pairs 0.85 to 0.95 of it, where shared memory needs
# 0.75 of its cycles (608 of 811 a tile), the tensor cores 704 of 640, and there are 4 % fewer tiles. If slower than 1.0, two
# consumers do not hide the softmax: then see "WRONG no softmax" and "no turns".
export PYTHONPATH=.:kernels:tests
timeout 60 python3 -m pytest -q tests/mta_kernels/test_hopper_forward.py -k "two_rows or test_shapes" 2>&1 | tail -3
timeout 150 python3 pairs_bench.py 2>&1 | tee $OUT/pairs.txt | tail -40
