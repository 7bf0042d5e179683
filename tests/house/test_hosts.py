"""No tracked file says where packages come from: that is each machine's own setting."""

from __future__ import annotations

import re

import pytest

REGISTRY = re.compile(
    r"""
      \bpypi\.(org|python\.org) | \bpythonhosted\.org                           # Python
    | \b(debian|ubuntu)\.(org|com|net)/(debian|ubuntu)                          # system packages
    | \b(deb|ftp|security|archive|ports|snapshot|mirrors?)\.(debian|ubuntu)\.
    | \bnpmjs\.(org|com) | \byarnpkg\.com | \bcrates\.io | \bproxy\.golang\.org # other languages
    | \brepo1?\.maven\. | \bmaven\.org
    | \bregistry-1\.docker\. | \b(ghcr|quay|gcr|mcr)\.(io|microsoft)            # images
    | ://[^\s/]*(mirror|artifactory|nexus|pypi|devpi)                           # a mirror of any of them
    | :/{2}\S+/simple\b
    | \b(index[-_]url|find[-_]links|default[-_]index)[\s="']*\w+://
    """,
    re.VERBOSE | re.IGNORECASE,
)
#: Each of them has one of these in it. To look for these first takes a fraction of the time.
WORDS = re.compile(
    "pypi|pythonhosted|debian|ubuntu|npmjs|yarnpkg|crates|golang|maven|docker|ghcr|quay|gcr|mcr"
    "|mirror|artifactory|nexus|devpi|/simple|index|links"
)


def registry_in(line: str) -> str | None:
    """Return what in a line names the host of a registry."""
    found = REGISTRY.search(line) if WORDS.search(line.lower()) else None
    return found and found.group()


def test_no_tracked_file_names_the_host_of_a_package_registry(root, tracked_files):
    named = [
        f"{file.relative_to(root)}:{number}: {found}"
        for file in tracked_files
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1)
        if (found := registry_in(line))
    ]
    assert named == []


# With spaces in them, so that this file names none.
@pytest.mark.parametrize(
    "text",
    [
        "https : //py pi.org/simple",
        "https : //files.python hosted.org/packages",
        "deb http : //deb.deb ian.org bookworm main",
        "https : //registry.npm js.org",
        "https : //packages-mir ror.internal:8080",
        "http : //10.0.0.1/root/sim ple/",
        "index -url=http : //packages.internal",
    ],
)
def test_the_host_of_a_registry_would_be_found(text):
    assert registry_in(text.replace(" ", ""))


def test_names_that_only_look_like_hosts_are_let_through():
    assert not registry_in("apt-get install docker.io iptables; https://www.apache.org/licenses/; UV_DEFAULT_INDEX=")
