"""The identity of a prompt."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from verl_ext.checks import InvalidValue
from verl_ext.policy import Prompt
from verl_ext.prompts import PromptStream, RowKey, prompt_id, prompt_id_of_group

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}]


def test_ids_in_old_checkpoints_stay_valid():
    assert prompt_id("sums", MESSAGES, "2") == "cbf2f5c0150fb418"
    assert prompt_id(None, [{"role": "user", "content": "é"}], None) == "b5f8f5def347a094"
    assert prompt_id("sums", MESSAGES, {"answers": [1, 2.5], "unit": None}) == "17988de77f2fe963"


@pytest.mark.parametrize(
    ("key", "row"),
    [("a-1_2_3", ("a-1", 2, 3)), ("a_b_2_0", ("a_b", 2, 0)), ("a-1", ("a-1", -1, -1)), ("a_2_x", ("a_2_x", -1, -1))],
)
def test_keys_of_rows_are_group_session_and_output(key, row):
    assert RowKey.parse(key) == row


def test_the_container_of_the_content_does_not_matter():
    reordered = [{"content": message["content"], "role": message["role"]} for message in MESSAGES]
    for same in (tuple(MESSAGES), np.array(MESSAGES, dtype=object), reordered):
        assert prompt_id("sums", same, "2") == prompt_id("sums", MESSAGES, "2")
    assert prompt_id("sums", MESSAGES, np.array([1, 2])) == prompt_id("sums", MESSAGES, [1, 2])
    assert prompt_id("sums", MESSAGES, np.int64(3)) == prompt_id("sums", MESSAGES, 3)


def test_each_of_the_three_arguments_counts():
    others = [("others", MESSAGES, "2"), ("sums", MESSAGES[1:], "2"), ("sums", MESSAGES, "3"), ("sums", MESSAGES, 2)]
    assert len({prompt_id("sums", MESSAGES, "2"), *(prompt_id(*other) for other in others)}) == 5


def test_images_count_and_values_without_content_are_refused():
    with_image = [[{"role": "user", "content": [{"type": "image", "image": image}]}] for image in (b"one", b"two")]
    assert len({prompt_id("seen", messages, "2") for messages in with_image}) == 2
    with pytest.raises(TypeError, match="a prompt holds a object, which has no stable identity"):
        prompt_id("sums", MESSAGES, object())


@pytest.mark.parametrize(
    ("uid", "expected"),
    [
        ("0123456789abcdef-17", "0123456789abcdef"),
        ("0123456789abcdef-17_3_0", "0123456789abcdef"),
        ("0123456789abcdef", None),
        ("c0ffee00-1234-4abc-9def-0123456789ab_0_0", None),
        ("pad0123456789abcdef0123456789abcdef_0_0", None),
        ("", None),
    ],
)
def test_the_prompt_id_of_a_group(uid, expected):
    assert prompt_id_of_group(uid) == expected


def test_a_stream_counts_what_it_has_seen_and_drawn():
    rows = [Prompt(f"p{row}", row) for row in range(4)]
    stream = PromptStream(itertools.cycle(rows), 4, lambda prompt_id: prompt_id == "p1")
    stream.evict(rows[2])
    assert [prompt.id for prompt in stream.draw(2)] == ["p0", "p3"]
    assert stream.metrics() == {
        "data/epoch": 1.0,
        "data/drawn_total": 2.0,
        "data/passed_over_total": 2.0,
        "data/evicted_total": 1.0,
    }
    assert [prompt.id for prompt in stream.draw(5, but=["p3"])] == ["p0"]
    assert (stream.seen_total, stream.drawn_total) == (4 + 4, 3)  # it has met all rows once
    assert stream.draw(1, but=["p0", "p3"]) == [] and stream.seen_total == 4 + 4 + 4
    restored = PromptStream(itertools.cycle(rows), 4, lambda prompt_id: False)
    restored.load_state_dict(stream.state_dict())
    assert restored.metrics() == stream.metrics() and restored.evicted == {"p2"}
    with pytest.raises(ValueError, match="^PromptStream: state has version 9, this code reads version 1"):
        restored.load_state_dict({"version": 9})


def test_a_wrong_number_of_prompts_and_data_that_ends_are_refused():
    rows = [Prompt(f"p{row}", row) for row in range(3)]
    stream = PromptStream(iter(rows), 3, lambda prompt_id: False)
    for prompt in stream.draw(2):
        stream.put_back(prompt)
    for count in (-1, 2.5):
        with pytest.raises(InvalidValue, match=f"^count={count} is not valid: use an integer of at least 0$"):
            stream.draw(count)
    assert stream.draw(0) == [] and len(stream.draw(3)) == 3
    with pytest.raises(RuntimeError, match="^the data ended after 3 rows: .* without end, as itertools.cycle does$"):
        stream.draw(1)


def test_a_stream_gives_up_only_after_two_epochs_in_a_row_without_a_prompt():
    free = Prompt("p0", 0)
    order = [*[free] * 7, Prompt("p1", 1), *[free] * 7, Prompt("p2", 2)]
    stream = PromptStream(iter(order), 4, lambda prompt_id: False)
    assert [prompt.id for prompt in stream.draw(3)] == ["p0", "p1", "p2"]
    twice = PromptStream(itertools.cycle([free, free, Prompt("p1", 1), Prompt("p1", 1)]), 4, lambda prompt_id: False)
    assert [prompt.id for prompt in twice.draw(3)] == ["p0", "p1"] and twice.seen_total == 3 + 8


def test_prompts_that_were_put_back_come_first_and_once():
    rows, live = [Prompt(f"p{row}", row, {"data_source": "a"}) for row in range(5)], set()
    stream = PromptStream(itertools.cycle(rows), 5, live.__contains__)
    first = stream.draw(4)
    for prompt in (first[3], first[1], first[1]):
        stream.put_back(prompt)
    assert (stream.drawn_total, stream.metrics()["data/passed_over_total"]) == (2, 0)
    state = json.loads(json.dumps(stream.state_dict()))
    assert [prompt.id for prompt in stream.draw(1, but=["p3"])] == ["p1"]  # p3 stays where it is
    assert [prompt.id for prompt in stream.draw(3)] == ["p3", "p4", "p0"]
    assert stream.metrics()["data/passed_over_total"] == 0
    restored = PromptStream(itertools.cycle([*rows[4:], *rows[:4]]), 5, live.__contains__)
    restored.load_state_dict(state)
    drawn = restored.draw(9)
    assert [prompt.id for prompt in drawn] == ["p3", "p1", "p4", "p0", "p2"] and drawn[0].metadata == rows[3].metadata
    stream.put_back(rows[1])
    live.add("p1")
    assert "p1" not in {prompt.id for prompt in stream.draw(9)}
    live.clear()
    assert [prompt.id for prompt in stream.draw(1)] == ["p1"]
    stream.put_back(rows[1])
    stream.evict(rows[1])
    stream.put_back(rows[1])
    assert not stream.returned and "p1" not in {prompt.id for prompt in stream.draw(9)}


def test_a_prompt_that_waits_is_not_read_from_the_data_as_well():
    rows = [Prompt(f"p{row}", row) for row in range(3)]
    stream = PromptStream(itertools.cycle(rows), 3, lambda _: False)
    stream.put_back(stream.draw(1)[0])
    assert [prompt.id for prompt in stream.draw(3, but=["p0"])] == ["p1", "p2"] and list(stream.returned) == ["p0"]
