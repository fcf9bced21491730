"""Shapes of the papers' models, from their published ``config.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from verl_ext import extras


@dataclass(frozen=True)
class Shape:
    """A decoder. A formula counts parameters with grouped-query attention and a gated MLP (Qwen2, Qwen3, Llama 3).

    Attributes:
        layers: ``num_hidden_layers``.
        hidden: ``hidden_size``.
        intermediate: ``intermediate_size`` of the MLP.
        heads: ``num_attention_heads``.
        key_value_heads: ``num_key_value_heads``.
        vocabulary: ``vocab_size``.
        tied: ``tie_word_embeddings``; input and output embeddings are one matrix.
        positions: ``max_position_embeddings``.
        family: ``model_type``; qwen2 has biases in query, key and value, qwen3 normalises query and key.
        head_dim: ``head_dim``, by default hidden / heads.
        counted: number of parameters of a model of another family.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    vocabulary: int
    tied: bool
    positions: int
    family: str
    head_dim: int = 128
    counted: int | None = None

    @property
    def parameters(self) -> int:
        """Number of parameters: ``counted``, or the sum of embeddings, attention, MLP and norms."""
        if self.counted is not None:
            return self.counted
        query, key_value = self.heads * self.head_dim, self.key_value_heads * self.head_dim
        attention = self.hidden * (2 * query + 2 * key_value)
        extra = {"qwen2": query + 2 * key_value, "qwen3": 2 * self.head_dim}.get(self.family, 0)
        layer = attention + extra + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + self.hidden + self.vocabulary * self.hidden * (1 if self.tied else 2)


_QWEN2_5_1_5B = (28, 1536, 8960, 12, 2, 151936)
_QWEN2_5_7B = (28, 3584, 18944, 28, 4, 152064)
_QWEN3_4B = (36, 2560, 9728, 32, 8, 151936)
_QWEN3_8B = (36, 4096, 12288, 32, 8, 151936)
_QWEN3_14B = (40, 5120, 17408, 40, 8, 151936)

SHAPES: dict[str, Shape] = {
    "Qwen/Qwen2.5-Math-1.5B": Shape(*_QWEN2_5_1_5B, True, 4096, "qwen2"),
    "Qwen/Qwen2.5-1.5B-Instruct": Shape(*_QWEN2_5_1_5B, True, 32768, "qwen2"),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": Shape(*_QWEN2_5_1_5B, False, 131072, "qwen2"),
    "Qwen/Qwen2.5-3B": Shape(36, 2048, 11008, 16, 2, 151936, True, 32768, "qwen2"),
    "meta-llama/Llama-3.2-3B-Instruct": Shape(28, 3072, 8192, 24, 8, 128256, True, 131072, "llama"),
    "Qwen/Qwen3-4B-Base": Shape(*_QWEN3_4B, True, 32768, "qwen3"),
    "Qwen/Qwen3-4B-Instruct-2507": Shape(*_QWEN3_4B, True, 262144, "qwen3"),
    "Qwen/Qwen2.5-7B": Shape(*_QWEN2_5_7B, False, 131072, "qwen2"),
    "Qwen/Qwen2.5-Math-7B": Shape(*_QWEN2_5_7B, False, 4096, "qwen2"),
    "meta-llama/Llama-3.1-8B-Instruct": Shape(32, 4096, 14336, 32, 8, 128256, False, 131072, "llama"),
    "Qwen/Qwen3-8B-Base": Shape(*_QWEN3_8B, False, 32768, "qwen3"),
    "Qwen/Qwen3-8B": Shape(*_QWEN3_8B, False, 40960, "qwen3"),
    "Qwen/Qwen3-14B-Base": Shape(*_QWEN3_14B, False, 32768, "qwen3"),
    "Qwen/Qwen3-14B": Shape(*_QWEN3_14B, False, 40960, "qwen3"),
    "Qwen/Qwen3-32B": Shape(64, 5120, 25600, 64, 8, 151936, False, 40960, "qwen3"),
}


FORMULA = ("llama", "qwen2", "qwen3")
"""Families whose parameters :attr:`Shape.parameters` counts."""


def find(model: str) -> Shape:
    """The shape of a model of the papers, of a folder or file, or of a name on the hub (its ``config.json`` alone).

    Raises:
        ValueError: there is no such model, or its ``config.json`` cannot be used.
    """
    if model in SHAPES:
        return SHAPES[model]
    if Path(model).exists():
        return read(Path(model))
    for name in SHAPES:  # before the hub, which takes seconds to say no
        if model.casefold() in (name.casefold(), name.partition("/")[2].casefold()):
            raise ValueError(f"model={model} is not valid: did you mean {name}?")
    import httpx
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return read(Path(hf_hub_download(model, "config.json")))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        names = ", ".join(SHAPES)
        raise ValueError(
            f"model={model} is no folder, and its config.json cannot be had from the hub; use a model's folder, its "
            f"config.json, or one of {names}."
        ) from error


def read(path: Path) -> Shape:
    """The shape in a ``config.json``, or in a folder's ``config.json``.

    transformers builds models of other families than ``FORMULA`` without memory for their weights, to count them. The
    KV cache of models that compress or bound it is smaller than computed.

    Raises:
        ValueError: the file cannot be read, lacks a key, or describes a model unknown to transformers.
        MissingExtra: the model is of another family than ``FORMULA``, and torch or transformers is not installed.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
        text = config.get("text_config", config)  # models of text and images
        shape = Shape(
            layers=text["num_hidden_layers"],
            hidden=text["hidden_size"],
            intermediate=text["intermediate_size"],
            heads=text["num_attention_heads"],
            key_value_heads=text.get("num_key_value_heads") or text["num_attention_heads"],
            vocabulary=text["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            positions=text["max_position_embeddings"],
            family=config["model_type"],
            head_dim=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
        )
    except OSError as error:
        reason = "the folder has no config.json" if not file.exists() else f"it cannot be read ({error.strerror})"
        raise ValueError(f"model={path}: {reason}; use a model's folder, or one of {', '.join(SHAPES)}.") from error
    except (ValueError, AttributeError) as error:
        raise ValueError(f"model={path}: {file.name} is no JSON object ({error}).") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"model={path}: its config.json has no usable {error}; a decoder of text has one.") from error
    return shape if shape.family in FORMULA else replace(shape, counted=_count(file))


def _count(file: Path) -> int:
    """Number of parameters of the model that transformers builds from a ``config.json``."""
    extras.require("learn", "torch", "transformers")
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(file)
        of_images = hasattr(config, "text_config")
        factory = transformers.AutoModelForImageTextToText if of_images else transformers.AutoModelForCausalLM
        with torch.device("meta"):
            model = factory.from_config(config)
        model.tie_weights()
    except Exception as error:  # models of all kinds raise errors of all kinds
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"model={file}: transformers cannot build it ({reason}).") from error
    return sum(parameter.numel() for parameter in model.parameters())
