"""The list of planted bugs fits the code: each still has its place and its catcher (planted.py itself takes minutes)."""

import re

import pytest
from planted import BUGS, ROOT


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_has_one_place_and_a_catcher(bug):
    assert (ROOT / bug.file).read_text().count(bug.right) == 1 and bug.wrong != bug.right
    file, _, test = bug.catcher.partition("::")
    text = (ROOT / file.split()[0]).read_text()
    assert not test or re.search(rf"^def {test}\(", text, re.MULTILINE)
