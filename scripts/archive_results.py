"""Moves results files of a GPU into its archive, whose index says what each is:

    python scripts/archive_results.py results/nvidia-h200 experiments/drafts.csv --what "times of drafts of the merge"

The same files make the same archive: names are in order and their times fixed.
"""

from __future__ import annotations

import argparse
import csv
import io
import zipfile
from pathlib import Path

INDEX, FIXED = ("file", "what", "revision"), (1980, 1, 1, 0, 0, 0)


def revision_of(data: bytes) -> str:
    """The commits that the rows of a file name, in order."""
    head = data.partition(b"\n")[0].split(b",")
    column = next((name for name in ("git_sha", "commit") if name.encode() in head), None)
    rows = csv.DictReader(io.StringIO(data.decode())) if column else []
    return "; ".join(dict.fromkeys(row[column] for row in rows if row[column]))


def write_archive(path: Path, files: dict[str, bytes]) -> None:
    """Write files by name, in order and with a fixed time."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, FIXED)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, files[name], zipfile.ZIP_DEFLATED, 9)


def add(folder: Path, names: list[str], what: str) -> None:
    """Move files of a folder into its archive.zip, and add their lines to archive.csv."""
    path, index = folder / "archive.zip", folder / "archive.csv"
    files: dict[str, bytes] = {}
    lines: dict[str, list[str]] = {}
    if path.exists():
        with zipfile.ZipFile(path) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        lines = {line[0]: line for line in list(csv.reader(index.read_text().splitlines()))[1:]}
    for name in names:
        files[name] = (folder / name).read_bytes()
        lines[name] = [name, what, revision_of(files[name])]
    write_archive(path, files)
    with open(index, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([INDEX, *(lines[name] for name in sorted(files))])
    for name in names:
        (folder / name).unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="+", help="as they are named in the folder")
    parser.add_argument("--what", required=True, help="what they have, for the index")
    given = parser.parse_args()
    add(given.folder, given.files, given.what)
