"""Links to the commits of a repository on GitHub, and on what has the same addresses: Gitea, Forgejo."""

from __future__ import annotations

import re

from mtabench.errors import UsageError

_SHA = re.compile(r"[0-9a-f]{7,64}")
_URL = re.compile(r"https?://[A-Za-z0-9.\-]+(:\d{1,5})?(/[A-Za-z0-9._~/\-]*)?")


def parse_repo_url(url: str) -> str:
    """The address without a slash or `.git` at its end; raises UsageError for what is no plain http(s) address."""
    address = url.strip().rstrip("/").removesuffix(".git")
    if not _URL.fullmatch(address):
        raise UsageError(
            f"--repo-url {url!r} is not an address of a repository; expected one such as https://github.com/owner/name"
        )
    return address


def compare_url(repo_url: str, good_sha: str, bad_sha: str) -> str:
    """The page of the commits after `good_sha` up to `bad_sha`; empty without a repository or revisions."""
    if not repo_url or not _SHA.fullmatch(bad_sha):
        return ""
    if not _SHA.fullmatch(good_sha) or good_sha == bad_sha:
        return f"{repo_url}/commit/{bad_sha}"
    return f"{repo_url}/compare/{good_sha}...{bad_sha}"
