"""The pinned verl, and other versions, which are accepted by signature."""

import pytest
import verl
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_ext.driver.compat import VERL_VERSION, check_constants, check_signature, check_verl
from verl_ext.errors import RunError


def test_installed_verl_is_the_one_we_know(caplog):
    check_verl()
    assert verl.__version__ == VERL_VERSION and not caplog.records


def test_another_version_that_fits_is_accepted_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(verl, "__version__", "0.10.0")
    check_verl()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.name == "verl_ext.driver.compat"
    assert record.getMessage().startswith("verl 0.10.0 has the functions") and "tested with verl 0.9.1" in caplog.text


def test_another_version_that_does_not_fit_is_refused_and_its_lack_is_named(monkeypatch, caplog):
    monkeypatch.setattr(verl, "__version__", "0.9.0")
    monkeypatch.delattr(PPOTrainer, "prepare_step")
    with pytest.raises(RunError, match=r"verl 0\.9\.0 is installed .*'prepare_step'.*: pip install verl==0\.9\.1"):
        check_verl()
    assert not caplog.records


def test_another_version_with_other_parameters_is_refused(monkeypatch):
    monkeypatch.setattr(verl, "__version__", "0.10.0")
    monkeypatch.setattr(PPOTrainer, "prepare_step", lambda self, batch: None)
    with pytest.raises(RunError, match="takes .*'batch'.*expected .*as in verl 0.9.1"):
        check_verl()


def test_a_moved_signature_or_constant_is_named():
    def sample(self, partition_id):
        return "__n__"

    with pytest.raises(RunError, match="sample takes.*expected.*batch_size.*verl 0.9.1"):
        check_signature(sample, ("self", "partition_id", "batch_size"))
    with pytest.raises(RunError, match="no longer contains '__rollout_n__'"):
        check_constants(sample, ("__rollout_n__",))
