"""docs/remote.md has every option of `Remote`, with its default."""

import re
from dataclasses import fields
from pathlib import Path

from tiercache.config import Remote

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "remote.md").read_text(encoding="utf-8")


def test_every_option_has_its_default():
    table = PAGE.partition("| option of `Remote` |")[2].partition("\n\n")[0]
    said = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]+?)`? \|", table, re.MULTILINE))
    assert said == {
        item.name: str(item.default).replace("prefill", '"prefill"') for item in fields(Remote) if item.name != "tier"
    }
