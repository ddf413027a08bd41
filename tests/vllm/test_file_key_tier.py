"""The key tier that processes of the vLLM tests share is one."""

from pathlib import Path

import pytest
from file_key_tier import FileKeyTier

from tiercache.testing.key_tier_suite import KeyTierSuite, MakeKeyTier


class TestFileKeyTier(KeyTierSuite):
    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> MakeKeyTier:
        return lambda: FileKeyTier(tmp_path / "values")
