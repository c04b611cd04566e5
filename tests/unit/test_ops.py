# SPDX-License-Identifier: Apache-2.0
"""Rows, slots and one-query attention against arithmetic by hand and PyTorch's own attention."""

import pytest
import torch

from vllm_gaudi_ext.ops import last_token_rows, single_query_attention, visible_slots


def test_rows_are_the_last_real_tokens():
    # The pass of the runner with prompts of 5, 40, 77 and 200 tokens padded to 256.
    assert last_token_rows(torch.tensor([5, 40, 77, 200], dtype=torch.int32), 256).tolist() == [4, 295, 588, 967]


def test_padding_sequence_does_not_alias_its_neighbour():
    # Sequence 0 fills its row: a padding sequence at row 128 - 1 would be its last token.
    rows = last_token_rows(torch.tensor([128, 0, 3, 0], dtype=torch.int32), 128)
    assert rows.tolist() == [127, 128, 258, 384]


def test_full_attention_sees_the_whole_prompt():
    slots, visible = visible_slots(torch.tensor([[256, 257, 258, -1], [640, -1, -1, -1]]), torch.tensor([3, 1]), None)
    assert visible.tolist() == [[True, True, True, False], [True, False, False, False]]
    assert slots[visible].tolist() == [256, 257, 258, 640]
    assert slots[~visible].tolist() == [256, 640, 640, 640]


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, [100]), (2, [100, 101]), (3, [100, 101, 102]), (4, [101, 102, 103]), (6, [103, 104, 105])],
)
def test_sliding_window_sees_the_last_window_tokens(length, expected):
    # The last token at p = length - 1 sees j with p - j < 3.
    slot_mapping = torch.tensor([[*range(100, 100 + length), *[-1] * (6 - length)]])
    slots, visible = visible_slots(slot_mapping, torch.tensor([length]), 3)
    assert slots.shape == visible.shape == (1, 3)
    assert slots[visible].tolist() == expected


def test_window_longer_than_the_bucket():
    slots, visible = visible_slots(torch.tensor([[7, 8, -1, -1]]), torch.tensor([2]), 512)
    assert slots.shape == (1, 4)
    assert slots[visible].tolist() == [7, 8]


def test_padding_sequence_gathers_something_finite():
    slots, visible = visible_slots(torch.full((1, 4), -1), torch.tensor([0]), None)
    assert slots.min() >= 0
    assert visible.any()


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_attention_is_the_last_row_of_causal_attention(kv_heads):
    torch.manual_seed(0)
    length, heads, head_size, scale = 11, 8, 16, 0.3
    query = torch.randn(1, heads, length, head_size)
    key, value = torch.randn(2, 1, kv_heads, length, head_size).unbind(0)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True
    )[:, :, -1]
    padded = [torch.nn.functional.pad(kv.transpose(1, 2), (0, 0, 0, 0, 0, 5), value=1e3) for kv in (key, value)]
    visible = torch.arange(16) < length
    got = single_query_attention(query[:, :, -1], *padded, visible.unsqueeze(0), scale)
    torch.testing.assert_close(got, expected)


def test_softmax_is_float32_in_bfloat16():
    # Scores 0, and -6 of 4,096 tokens: in bfloat16 their sum of exponentials stops growing at 1 + 2**-8 steps.
    query = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    key = torch.full((1, 4096, 1, 1), -6.0, dtype=torch.bfloat16)
    key[:, 0] = 0
    value = torch.zeros_like(key)
    value[:, 0] = 1
    got = single_query_attention(query, key.float(), value.float(), torch.ones(1, 4096, dtype=torch.bool), 1.0)
    expected = 1 / (1 + 4095 * torch.exp(torch.tensor(-6.0)))
    assert got.item() == pytest.approx(expected.item(), rel=2**-7)


def test_traces_without_a_graph_break_and_without_reading_values():
    def rows_and_slots(query_lens, slot_mapping):
        return last_token_rows(query_lens, slot_mapping.size(1)), *visible_slots(slot_mapping, query_lens, 4)

    torch._dynamo.utils.counters.clear()
    traced = torch.compile(rows_and_slots, fullgraph=True, backend="eager", dynamic=False)
    graphs = torch._dynamo.utils.counters["stats"]
    for lens in ([5, 0], [1, 8], [8, 3]):
        slot_mapping = torch.arange(16).view(2, 8)
        eager = rows_and_slots(torch.tensor(lens), slot_mapping)
        for got, expected in zip(traced(torch.tensor(lens), slot_mapping), eager, strict=True):
            assert torch.equal(got, expected)
    assert graphs["unique_graphs"] == 1
