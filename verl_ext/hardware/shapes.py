"""Shapes of the papers' models, from their published ``config.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """A decoder with grouped-query attention and a gated MLP (Qwen2, Qwen3, Llama 3).

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

    @property
    def parameters(self) -> int:
        """Number of parameters: embeddings, attention, MLP and norms."""
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


def read(path: Path) -> Shape:
    """The shape in a ``config.json``, or in a folder's ``config.json``.

    Raises:
        ValueError: the file cannot be read, or lacks a key.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
        return Shape(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=config["num_attention_heads"],
            key_value_heads=config["num_key_value_heads"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            positions=config["max_position_embeddings"],
            family=config["model_type"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"model={path} must be one of {', '.join(SHAPES)}, or a model's folder.") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"model={path}: its config.json has no usable {error}; a decoder of text has one.") from error
