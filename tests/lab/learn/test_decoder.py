from __future__ import annotations

import torch

from verl_ext.lab.learn.decoder import MOST_PROMPT, MOST_RESPONSE, Decoder


def test_the_first_token_of_a_response_has_one_position_behind_prompts_of_all_lengths():
    lengths = torch.arange(1, MOST_PROMPT + 1)
    assert set((Decoder().first_positions(lengths) + lengths).tolist()) == {MOST_PROMPT}


def test_the_longest_row_has_a_position_for_each_token_and_padding_needs_none():
    torch.manual_seed(0)
    decoder, length = Decoder(), MOST_PROMPT + MOST_RESPONSE
    tokens = torch.randint(10, (1, length))
    with torch.no_grad():
        exact = decoder.logits(tokens, torch.tensor([0]))
        padded = decoder.logits(torch.cat([tokens, tokens], 1), torch.tensor([0]))[:, :length]
        decoder.position.weight[-1] += 1
        moved = decoder.logits(tokens, torch.tensor([0]))
    torch.testing.assert_close(padded, exact)
    assert torch.equal(moved[:, :-1], exact[:, :-1]) and not torch.equal(moved[:, -1], exact[:, -1])
