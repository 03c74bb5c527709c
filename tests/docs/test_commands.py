"""The commands in the README and in CONTRIBUTING exist."""

import re
from pathlib import Path

import pytest

from tests.docs.commands import problem_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_commands_of_a_page_exist(name: str) -> None:
    blocks = re.findall(r"^```console\n(.*?)^```", (ROOT / name).read_text(), re.M | re.S)
    commands = [line[2:] for block in blocks for line in block.splitlines() if line[:2] == "$ "]
    assert len(commands) >= 3
    assert [problem for c in commands if (problem := problem_of(c))] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"])
def test_links_of_a_page_lead_to_files(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text())
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert missing == []
