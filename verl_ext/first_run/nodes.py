"""The checks of node.py on every node, as rows of the table."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from verl_ext.files import write_text
from verl_ext.first_run.node import NOTE, ON_CPU, ON_GPUS, Found, Question, check_node, installed_versions
from verl_ext.first_run.place import CPU, NotTried, Place
from verl_ext.first_run.table import FAILED, PASSED, Row
from verl_ext.hardware.cores import Node, lack_of_cores, to_nodes
from verl_ext.policy import MODES

RAY = "nodes in Ray"
SECONDS = 600  # for the checks of all nodes
KNOCK = 10  # for the head to accept a connection
ByNode = Mapping[str, Mapping[str, Found]]


def check_nodes(place: Place, out: Path, show: Callable[[str], None]) -> list[Row]:
    """Check this machine, or every node of the Ray cluster that the trainings will join; a row per check."""
    note = uuid4().hex
    write_text(out / NOTE, note)
    question = Question(place, out, note, ON_CPU if place.hardware == CPU else ON_GPUS)
    if place.address is None:
        return to_rows({socket.gethostname(): check_node(question)})
    show("asks the nodes of the cluster")
    found, rows = on_cluster(replace(question, versions=installed_versions()))
    return [*rows, *to_rows(found)]


def on_cluster(question: Question) -> tuple[dict[str, dict[str, Found]], list[Row]]:
    """The checks by node, and a row about the nodes themselves. Ray's tasks take no cores and no GPUs."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place, start = question.place, time.monotonic()
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        _knock(str(place.address))
        ray.init(address=place.address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
        reason = " ".join(str(error).split())[:300]
        return {}, [Row(RAY, FAILED, f"RAY_ADDRESS={place.address} cannot be joined: {reason}")]
    finally:  # ray.init has set a handler that exits with status 15
        signal.signal(signal.SIGTERM, on_sigterm)
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        tasks = {}
        for node in nodes:
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(check_node).options(num_cpus=0, max_retries=0, scheduling_strategy=where)
            tasks[node["NodeName"]] = task.remote(question)
        found = {}
        for name, task in tasks.items():
            try:
                found[name] = ray.get(task, timeout=max(1.0, SECONDS - (time.monotonic() - start)))
            except ray.exceptions.RayError as error:
                found[name] = {"answer": Found(False, f"no answer: {' '.join(str(error).split())[:300]}")}
    finally:
        ray.shutdown()
    return found, [about_nodes(place, to_nodes(nodes), time.monotonic() - start)]


def _knock(address: str) -> None:
    """Raise OSError if nobody listens at ``host:port``: Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.rpartition("/")[2], int(port)), timeout=KNOCK).close()


def about_nodes(place: Place, nodes: Sequence[Node], seconds: float) -> Row:
    """Whether enough nodes have joined Ray, with enough GPUs each, and with the cores of a training in some mode.

    Args:
        nodes: the nodes in Ray.
        seconds: how long the nodes took to answer.
    """
    enough = [node for node in nodes if node.gpus >= place.gpus]
    counts = ", ".join(f"{node.name} with {node.gpus:g}" for node in sorted(nodes))
    if len(enough) < place.nodes:
        why = f"NNODES={place.nodes} nodes with GPUS_PER_NODE={place.gpus} are needed, and Ray has {counts}"
        return Row(RAY, FAILED, why, seconds)
    sentences, units = [], 1 if place.hardware == CPU else max(8, 2 * place.nodes)  # as in config/hardware
    for mode in MODES:
        with contextlib.suppress(NotTried):
            training, pool = place.devices(mode)
            engines = pool[0] * pool[1] if pool else 0
            sentences.append(lack_of_cores(nodes, [training], engines, units))
    if all(sentences):
        return Row(RAY, FAILED, sentences[0], seconds)
    return Row(RAY, PASSED, f"GPUs in Ray: {counts}", seconds)


def to_rows(found: ByNode) -> list[Row]:
    """A row per check: passed, with the first node's text; or failed, with the sentences of the nodes that failed."""
    rows = []
    for check in dict.fromkeys(name for results in found.values() for name in results):
        results = {node: each[check] for node, each in found.items() if check in each}
        faults: dict[str, list[str]] = {}
        for node, result in results.items():
            if not result.passed:
                faults.setdefault(result.text, []).append(node)
        seconds = max(result.seconds for result in results.values())
        if faults:
            why = "; ".join(f"{', '.join(nodes)}: {text}" for text, nodes in faults.items())
            rows.append(Row(check, FAILED, why, seconds))
        else:
            rows.append(Row(check, PASSED, next(iter(results.values())).text, seconds))
    return rows
