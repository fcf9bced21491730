"""The pinned verl, and the messages about another version."""

import pytest
import verl

from verl_ext.driver.compat import check_constants, check_signature, check_verl
from verl_ext.errors import RunError


def test_installed_verl_is_the_one_we_know():
    check_verl()


def test_another_version_is_named(monkeypatch):
    monkeypatch.setattr(verl, "__version__", "0.10.0")
    with pytest.raises(RunError, match=r"verl 0\.10\.0 is installed.*verl 0\.9\.1: pip install verl==0\.9\.1"):
        check_verl()


def test_a_moved_signature_or_constant_is_named():
    def sample(self, partition_id):
        return "__n__"

    with pytest.raises(RunError, match="sample takes.*expected.*batch_size.*verl 0.9.1"):
        check_signature(sample, ("self", "partition_id", "batch_size"))
    with pytest.raises(RunError, match="no longer contains '__rollout_n__'"):
        check_constants(sample, ("__rollout_n__",))
