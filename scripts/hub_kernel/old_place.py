"""The kernel in the folder where older releases of `kernels` look for it: the names of the folder above."""

import importlib.util
import json
import sys
from pathlib import Path

_BUILD = Path(__file__).parents[1]
_ID = json.loads((_BUILD / "metadata.json").read_text())["id"]
if _ID not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_ID, _BUILD / "__init__.py")
    sys.modules[_ID] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_ID])
__all__ = list(sys.modules[_ID].__all__)
globals().update({_name: getattr(sys.modules[_ID], _name) for _name in __all__})
