"""A model of the time of a call: what its kernels do, counted from their sources, over what the device can do.

A kernel takes as long as the slowest of what runs side by side, plus what nothing hides:

    max(tensor cores + exponentials + CUDA cores, shared memory, L2, memory) + start-up of its programs + launch gaps

The first three are added: in these kernels a program's softmax waits for its product, and the next product for the
softmax. Where it does not, in the Hopper forward, the exponentials stand beside the rest. The kernels of a call
follow each other: their times are added. Where the host launches them one by one, a call takes at least the time that
the host needs.

Few constants say how far kernels stay below what the device does with a plain product or copy; they stand beside the
kernels that they are about (`fused`, `banded`, `dense`, `mta_passes` and so on, or the implementation's entry), with
the file that they were calibrated on. Nothing is fitted to a single cell. `tests/mtabench/test_model.py` and
`test_mta_model.py` hold the predictions against the committed results.
"""
