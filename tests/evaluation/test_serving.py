"""Command lines, and merging as far as it goes without a model; with one, see tests/stack/test_evaluation.py."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from rich.console import Console

from verl_ext.evaluation import serving
from verl_ext.evaluation.checkpoint import Checkpoint
from verl_ext.evaluation.child import ChildError


def test_the_servers_arguments_come_last_and_those_of_the_command_are_refused():
    arguments = serving.parse_arguments("--tensor-parallel-size 8 --hf-overrides '{\"a\": 1}' --model-impl vllm")
    assert arguments == ["--tensor-parallel-size", "8", "--hf-overrides", '{"a": 1}', "--model-impl", "vllm"]
    assert serving.parse_arguments("") == []
    command = serving.server_command(Path("/m"), "step", 8123, arguments)
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert command[3:] == [
        *("--model", "/m", "--served-model-name", "step", "--host", "127.0.0.1", "--port", "8123"),
        *("--generation-config", "vllm", *arguments),
    ]
    for text in ("--port 1", "--port=1", "--enforce-eager --served_model_name a", "--api-key x"):
        with pytest.raises(ValueError, match="must not set --[a-z_-]+: the server is this command's own"):
            serving.parse_arguments(text)
    with pytest.raises(ValueError, match="cannot be split into arguments .No closing quotation"):
        serving.parse_arguments("--a 'b")


def test_verls_merger_gets_the_actors_folder_and_its_backend():
    checkpoint = Checkpoint(Path("/run/global_step_5/actor"), "global_step_5-ab", "ab", "megatron")
    command = serving.merge_command(checkpoint, Path("/new"))
    assert command[:4] == [sys.executable, "-m", "verl.model_merger", "merge"]
    assert command[4:] == [
        *("--backend", "megatron", "--local_dir", "/run/global_step_5/actor"),
        *("--target_dir", "/new"),
    ]


def test_what_was_merged_is_used_again_and_only_for_the_same_checkpoint(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "merged-global_step_5-ab").mkdir()
    checkpoint = Checkpoint(tmp_path / "actor", "global_step_5-ab", "ab", "fsdp")
    assert serving.merge(checkpoint, out, Console(quiet=True)) == tmp_path / "merged-global_step_5-ab"

    other = Checkpoint(tmp_path / "actor", "global_step_5-cd", "cd", "no such backend")
    with pytest.raises(ChildError, match=f"failed: it ended with status 2; its log is {out}/merge.log and ends with"):
        serving.merge(other, out, Console(quiet=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged-global_step_5-ab", "out"]


def test_a_port_that_nobody_has_is_not_healthy():
    port = serving._free_port()
    assert not serving._is_healthy(port)
    with socket.socket() as one:
        one.bind((serving.HOST, port))  # it is free
