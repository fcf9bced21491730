"""The identity of a prompt."""

from __future__ import annotations

import numpy as np
import pytest

from verl_ext.prompts import prompt_id, prompt_id_of_group

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}]


def test_ids_in_old_checkpoints_stay_valid():
    assert prompt_id("sums", MESSAGES, "2") == "cbf2f5c0150fb418"
    assert prompt_id(None, [{"role": "user", "content": "é"}], None) == "b5f8f5def347a094"
    assert prompt_id("sums", MESSAGES, {"answers": [1, 2.5], "unit": None}) == "17988de77f2fe963"


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
