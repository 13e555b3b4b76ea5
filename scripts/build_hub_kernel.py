"""Build the folder that Hugging Face's `kernels` hub serves, from kernels/mta_kernels. Needs no GPU and no PyTorch.

    PYTHONPATH=.:kernels python3 scripts/build_hub_kernel.py --out dist/mta-kernels

docs/hub.md says how to check, publish and use it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hub_kernel.layout import build


def main() -> int:
    """Build, and print the folder of each build."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path("dist/mta-kernels")
    parser.add_argument("--out", type=Path, default=default, help="the folder to make; %(default)s if not given")
    out = parser.parse_args().out
    if out.exists():
        parser.error(f"{out} already exists; give another --out, or remove it first")
    try:
        for path in build(out):
            print(path)
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
