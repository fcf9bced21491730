"""Features of prompts from the base model that is trained (HORA Appendix F): a hidden state in the middle of its depth.

    python -m verl_ext.estimation.hidden_states --model FOLDER --data train.parquet --out features.npy

Then ``rollout_policy.estimator=probe +rollout_policy.estimator_options.features=features.npy``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from rich.console import Console
from rich.progress import track

from verl_ext.files import check_file


def hidden_states(
    prompts: Sequence[Sequence[dict[str, Any]]],
    *,
    model: str | Path,
    depth: float = 0.6,
    batch_size: int = 16,
    progress: bool = True,
) -> np.ndarray:
    """(n, d) float32: of each prompt, the last token's hidden state after block ⌊depth · L⌋ of L.

    Args:
        prompts: chat messages, rendered by the model's own template with the generation prompt.
        model: folder of a transformers model; loaded in float32, on a GPU where there is one.
        depth: in (0, 1].
        batch_size: prompts per forward pass.
        progress: show a progress bar.

    Raises:
        ValueError: no prompts, a depth outside (0, 1], or ``model`` is not the folder of a model.
    """
    _require_model(model)
    if not len(prompts):
        raise ValueError("prompts must be at least one.")
    if not 0 < depth <= 1:
        raise ValueError(f"depth={depth} must be in (0, 1].")
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    if tokenizer.pad_token is None:  # as Llama's; any token will do, since the attention mask hides padding
        tokenizer.pad_token = tokenizer.eos_token
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = AutoModel.from_pretrained(model, dtype=torch.float32).to(device).eval()
    block = int(depth * network.config.num_hidden_layers)
    chunks = [prompts[start : start + batch_size] for start in range(0, len(prompts), batch_size)]
    vectors = []
    for chunk in track(chunks, "hidden states", disable=not progress):
        texts = [
            tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
            for messages in chunk
        ]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
        with torch.no_grad():
            states = network(**batch, output_hidden_states=True).hidden_states[block]  # 0 is the embedding
        vectors.append(states[:, -1].float().cpu().numpy())
    return np.concatenate(vectors)


def _require_model(model: str | Path) -> None:
    if not (Path(model) / "config.json").is_file():
        raise ValueError(f"model={model} is not valid: name the folder of a transformers model, with config.json.")


def main(
    model: Annotated[Path, typer.Option(help="Folder of the model that training starts from.")],
    data: Annotated[list[Path], typer.Option(help="Parquet file of data.train_files; once per file, in their order.")],
    out: Annotated[Path, typer.Option(help="Where to write the features (.npy).")],
    depth: Annotated[float, typer.Option(help="Share of the model's blocks.")] = 0.6,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per forward pass.")] = 16,
    prompt_key: Annotated[str, typer.Option(help="Column of the messages, verl's data.prompt_key.")] = "prompt",
) -> None:
    """Write one row of features per row of the data."""
    try:
        _require_model(model)
        check_file(out).parent.mkdir(parents=True, exist_ok=True)
        prompts: list = []
        for file in data:
            rows = pd.read_parquet(file)
            if prompt_key not in rows:
                raise ValueError(f"--prompt-key {prompt_key}: {file} has {', '.join(rows.columns)}.")
            prompts += rows[prompt_key].tolist()
        features = hidden_states(prompts, model=model, depth=depth, batch_size=batch_size)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    np.save(out, features, allow_pickle=False)
    Console().print(f"{out}: {features.shape[0]} x {features.shape[1]}")


if __name__ == "__main__":
    typer.run(main)
