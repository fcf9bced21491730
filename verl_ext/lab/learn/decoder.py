"""The small learner: a decoder with some 60,000 parameters, in float32 on one core."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from verl_ext.lab.learn.tasks import VOCABULARY

MOST_PROMPT, MOST_RESPONSE = 24, 56


class Cache:
    """Keys and values of B rows in S places, of which each row uses some.

    Attributes:
        keys, values: per layer (B, heads, S, d).
        hidden: (B, S) 0 in the places in use, -inf elsewhere.
        used: places filled so far, the same for all rows; the prompts' padding counts as filled.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor], hidden: Tensor, used: int):
        self.keys, self.values, self.hidden, self.used = keys, values, hidden, used

    def select(self, rows: Tensor) -> Cache:
        """The cache of these rows, which may repeat."""
        keys, values = ([each[rows] for each in side] for side in (self.keys, self.values))
        return Cache(keys, values, self.hidden[rows], self.used)


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a layer norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (B, heads, T, d)."""
        rows, length, width = hidden.shape
        shape = (rows, length, 3, self.heads, width // self.heads)
        return self.qkv(self.before_attention(hidden)).view(shape).permute(2, 0, 3, 1, 4).unbind(0)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Add what attention found, (B, heads, T, d), and the feed-forward layer's part."""
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.before_feed(hidden))))


class Decoder(nn.Module):
    """A causal transformer over :mod:`~verl_ext.lab.learn.tasks`' tokens, with learned positions.

    The last token of every prompt has the same position, so that the n-th token of a response does too.

    Args:
        width: of the hidden states.
        layers: number of blocks.
        heads: of attention.
    """

    def __init__(self, width: int = 48, layers: int = 2, heads: int = 2):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(MOST_PROMPT + MOST_RESPONSE, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        self.scale = 1 / math.sqrt(width // heads)

    def first_positions(self, prompt_lengths: Tensor) -> Tensor:
        """(B,) position of each row's first token."""
        return MOST_PROMPT - prompt_lengths

    def logits(self, tokens: Tensor, first: Tensor) -> Tensor:
        """(B, T, V) logits of the next token, of (B, T) rows padded on the right."""
        hidden, _, _ = self._whole(tokens, first)
        return self.head(self.norm(hidden))

    def prefill(self, tokens: Tensor, lengths: Tensor, first: Tensor, room: int) -> tuple[Tensor, Cache]:
        """(B, V) logits behind the last token of each row, and a cache with room for ``room`` more tokens."""
        hidden, keys, values = self._whole(tokens, first)
        rows, used = tokens.shape
        grown = [F.pad(each, (0, 0, 0, room)) for each in (*keys, *values)]
        mask = torch.zeros(rows, used + room).masked_fill_(torch.arange(used + room) >= lengths[:, None], -math.inf)
        last = hidden[torch.arange(rows), lengths - 1]
        return self.head(self.norm(last)), Cache(grown[: len(keys)], grown[len(keys) :], mask, used)

    def step(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """(B, V) logits behind one more token per row, which joins the cache."""
        place = cache.used
        cache.used += 1
        cache.hidden[:, place] = 0
        mask = cache.hidden[:, None, None, : cache.used]
        hidden = (self.token(tokens) + self.position(positions))[:, None]
        for layer, block in enumerate(self.blocks):
            query, key, value = block.project(hidden)
            cache.keys[layer][:, :, place], cache.values[layer][:, :, place] = key[:, :, 0], value[:, :, 0]
            keys, values = cache.keys[layer][:, :, : cache.used], cache.values[layer][:, :, : cache.used]
            weights = (query @ keys.transpose(2, 3) * self.scale + mask).softmax(-1)
            hidden = block.finish(hidden, weights @ values)
        return self.head(self.norm(hidden[:, 0]))

    def _whole(self, tokens: Tensor, first: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Hidden states of whole rows, and each layer's keys and values. Padding comes last, so no token sees it."""
        positions = (first[:, None] + torch.arange(tokens.shape[1])).clamp(max=MOST_PROMPT + MOST_RESPONSE - 1)
        hidden, keys, values = self.token(tokens) + self.position(positions), [], []
        for block in self.blocks:
            query, key, value = block.project(hidden)
            keys.append(key)
            values.append(value)
            hidden = block.finish(hidden, F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return hidden, keys, values
