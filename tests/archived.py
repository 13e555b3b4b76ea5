"""Files of the archives in results/, unpacked."""

import tempfile
import zipfile
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
_folder = tempfile.TemporaryDirectory()  # gone when the tests end


def archived(name: str, gpu: str = "nvidia-h200") -> Path:
    """A file by its name in a GPU's archive, such as "history/fwd-23aa81e671e0.csv"."""
    with zipfile.ZipFile(RESULTS / gpu / "archive.zip") as archive:
        return Path(archive.extract(name, Path(_folder.name) / gpu))
