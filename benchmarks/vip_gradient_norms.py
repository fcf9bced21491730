"""Gradient norms of logged rollouts, for the checks of VIP's assumptions on a run of one's own (VIP Appendix B).

    python -m recipe.grpo ... trainer.rollout_data_dir=LOG          # the run writes LOG/<step>.jsonl
    python benchmarks/vip_gradient_norms.py LOG/1.jsonl --model MODEL --data TRAIN.parquet --out norms.jsonl
    python benchmarks/vip_assumptions.py norms.jsonl

MODEL is the policy that generated the rollouts: the initial model for step 1, and the merged checkpoint of step t for
step t + 1 (``python3 -m verl.model_merger merge``). verl's actor reports one norm per mini-batch, so the norms are
computed here, one rollout at a time. (The authors' scripts train with mini-batches of one rollout, advantage 1 and
learning rate 0 instead.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from pyarrow import parquet
from rich.console import Console
from rich.progress import track
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_ext.files import write_text
from verl_ext.prompts import prompt_id_of_group


class LoggedRollout(NamedTuple):
    """A line of verl's rollout log."""

    prompt: str  # Prompt.id
    output: str
    reward: float


def gradient(
    model: torch.nn.Module, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> tuple[float, float]:
    """(L2 norm, sum of the entries) of H(o), the gradient of a response's mean log-likelihood (VIP eq. 4):

        H(o) = 1/|o| sum_t grad_theta log pi_theta(o_t | q, o_<t)

    Args:
        model: a causal language model of transformers; the gradient is with respect to all trainable parameters.
        prompt: token ids of q, at least one.
        response: token ids of o, at least one.
        temperature: of the sampling; the logits are divided by it.
    """
    tokens = torch.tensor([[*prompt, *response]], device=model.device)
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
    model.zero_grad(set_to_none=True)
    (-cross_entropy(logits, tokens[0, len(prompt) :])).backward()
    parts = [parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.stack([part.square().sum() for part in parts]).sum().sqrt()
    total = torch.stack([part.sum() for part in parts]).sum()
    model.zero_grad(set_to_none=True)
    return float(norm), float(total)


def read_log(files: Sequence[Path], prompts: int, rollouts: int) -> list[LoggedRollout]:
    """The first ``rollouts`` rollouts of each of the first ``prompts`` prompts with so many rollouts."""
    by_prompt: dict[str, list[LoggedRollout]] = {}
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                prompt = prompt_id_of_group(row["uid"])
                if prompt is not None:
                    by_prompt.setdefault(prompt, []).append(LoggedRollout(prompt, row["output"], float(row["score"])))
    enough = [group[:rollouts] for group in by_prompt.values() if len(group) >= rollouts]
    return list(chain.from_iterable(enough[:prompts]))


def messages_of(data: Path) -> dict[str, list[dict[str, str]]]:
    """The messages of every row of a data file, by ``Prompt.id``."""
    rows = parquet.read_table(data, columns=["prompt", "extra_info"]).to_pylist()
    return {row["extra_info"]["prompt_id"]: row["prompt"] for row in rows}


def measured(
    log: Sequence[LoggedRollout], messages: dict[str, Any], model: Any, tokenizer: Any, temperature: float, longest: int
) -> Iterator[dict[str, Any]]:
    """One row for each rollout. The log holds text without special tokens, so a response is encoded again, and ends
    with the end-of-text token unless it is ``longest`` tokens long.
    """
    for rollout in log:
        prompt = tokenizer.apply_chat_template(
            messages[rollout.prompt], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        response = tokenizer.encode(rollout.output, add_special_tokens=False)
        response = response[:longest] if len(response) >= longest else [*response, tokenizer.eos_token_id]
        norm, total = gradient(model, prompt, response, temperature)
        numbers = {"gradient_norm": norm, "gradient_sum": total, "tokens": len(response)}
        yield {"prompt": rollout.prompt, "reward": rollout.reward, **numbers}


def main(
    log: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="Files of trainer.rollout_data_dir.")],
    model: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of the policy, in HF's format.")],
    data: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="Training data of the run (.parquet).")],
    out: Annotated[Path, typer.Option(help="JSON lines to write: prompt, reward, gradient_norm, gradient_sum.")],
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 600,
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts of each prompt.")] = 16,
    temperature: Annotated[float, typer.Option(help="Temperature of the run.")] = 1.0,
    longest: Annotated[int, typer.Option(help="data.max_response_length of the run.")] = 10240,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
) -> None:
    """Compute the norm of H(o) for logged rollouts (VIP eq. 4)."""
    chosen = read_log(log, prompts, rollouts)
    messages = messages_of(data)
    if not chosen:
        raise typer.BadParameter(f"no prompt of the log has {rollouts} rollouts of a run of this package.")
    if unknown := {rollout.prompt for rollout in chosen} - set(messages):
        raise typer.BadParameter(f"{len(unknown)} prompts of the log are not in {data}, for instance {min(unknown)}.")
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    rows = track(measured(chosen, messages, policy, tokenizer, temperature, longest), total=len(chosen))
    write_text(out, "".join(json.dumps(row) + "\n" for row in rows))
    Console().print(f"{len(chosen)} rollouts of {len(chosen) // rollouts} prompts: {out}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
