# SPDX-License-Identifier: Apache-2.0
"""What the host hands to the model without the flag, against arithmetic by hand: where the meaning of a value changes
and its name does not, `drift()` sees nothing."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm.forward_context import get_forward_context

from tests.harness import engine
from tests.harness.checkpoints import make_checkpoint
from tests.harness.workload import BLOCK, FULL_BEFORE, SLIDING, SLIDING_BEFORE, Request, play, prompt_of

WINDOW = 128
HIDDEN = -1e4  # less than this hides a token; the package asks for exactly 0 where one is visible
ASYNC, SYNC = "chunks of 256, async, prefix hits", "chunks of 512, sync, contiguous paged attention"
SETTINGS = {
    ASYNC: (FULL_BEFORE, {"max_num_batched_tokens": 256, "async_scheduling": True}),
    SYNC: (
        SLIDING_BEFORE,
        {
            "max_num_batched_tokens": 512,
            "async_scheduling": False,
            "enable_prefix_caching": False,
            "env": {"VLLM_CONTIGUOUS_PA": "true"},
        },
    ),
}
COMMON = [*prompt_of(2 * BLOCK, 1), *prompt_of(44, 2)], [*prompt_of(2 * BLOCK, 1), *prompt_of(70, 3)]
BATCHES = [  # requests that start together; what comes later gets the blocks of what has finished
    [prompt_of(n) for n in (5, 40, 77)],
    [prompt_of(700)],
    [prompt_of(n, 4) for n in (450, 30, 513)],  # next to decodes, a chunk may end within a block
    [COMMON[0]],
    [COMMON[1]],
]


@dataclass
class Sequence:
    """A request as vLLM's scheduler has it, which is no part of the host."""

    prompt: list[int]
    blocks: list[int]

    def slots(self, end: int) -> torch.Tensor:
        """KV cache slots of its first `end` tokens."""
        return torch.tensor([self.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(end)])


@dataclass
class Span:
    """Prompt tokens of a sequence that are scheduled in this step."""

    sequence: Sequence
    start: int
    end: int
    slots: torch.Tensor  # of all tokens up to the end

    @property
    def count(self) -> int:
        return self.end - self.start

    @property
    def tokens(self) -> list[int]:
        return self.sequence.prompt[self.start : self.end]


@dataclass
class Attention:
    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    metadata: Any
    output: torch.Tensor


@dataclass
class Pass:
    """A forward pass: tensors are copies, since the host may use its buffers again."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: Any  # as the model sees it
    called_with: Any  # as the runner calls the adapter, all of which is part of a graph's key
    scheduled: list[Span]
    held: set[int]  # all blocks that requests hold
    rotary: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)  # of each layer, cos and sin if prepared
    layers: list[tuple[Any, ...]] = field(default_factory=list)  # what enters, the per-layer input, what leaves
    attention: list[Attention] = field(default_factory=list)
    kv: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # after the pass
    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    read: torch.Tensor | None = None  # hidden states of which the runner computes logits

    @property
    def rows(self) -> list[Span | None]:
        """Of each row of a prompt pass, whose tokens it starts with; None if it is padding."""
        left = list(self.scheduled)
        rows: list[Span | None] = []
        for ids in self.input_ids.view(self.positions.shape).tolist():
            found = [span for span in left if ids[: span.count] == span.tokens]
            rows.append(max(found, key=lambda span: span.count, default=None))
            if found:
                left.remove(rows[-1])
        return rows

    def spans(self) -> list[tuple[int, Span]]:
        return [(row, span) for row, span in enumerate(self.rows) if span is not None]

    @property
    def padded_len(self) -> int:
        return self.positions.shape[1]


def copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


class Recorder:
    def __init__(self, llm: Any) -> None:
        self.runner, self.model = engine.runner_of(llm), engine.text_model_of(llm)
        self.layers = engine.layers_of(llm)
        self.llm = llm
        self.passes: list[Pass] = []
        self.sequences: dict[str, Sequence] = {}
        self.scheduled: list[Span] = []
        self.called_with: Any = None
        self.shared_writes: list[Any] = []

    def schedule(self, scheduled: Any) -> None:
        for req_id in scheduled.finished_req_ids:
            self.sequences.pop(req_id, None)
        starts = {}
        for new in scheduled.scheduled_new_reqs:
            self.sequences[new.req_id] = Sequence(list(new.prompt_token_ids), list(new.block_ids[0]))
            starts[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            starts[req_id] = cached.num_computed_tokens[index]
            self.sequences[req_id].blocks += (cached.new_block_ids[index] or [[]])[0]
        self.scheduled = []
        for req_id, start in starts.items():
            sequence, end = self.sequences[req_id], start + scheduled.num_scheduled_tokens[req_id]
            if start < len(sequence.prompt):
                self.scheduled.append(Span(sequence, start, end, sequence.slots(end)))

    def start_pass(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Pass:
        metadata = get_forward_context().attn_metadata
        held = {block for sequence in self.sequences.values() for block in sequence.blocks}
        now = Pass(copy(input_ids), copy(positions), metadata, self.called_with, list(self.scheduled), held)
        if isinstance(metadata, tuple):
            now.metadata = type(metadata)(*map(copy, metadata))
        for index, layer in enumerate(self.layers):
            rotary = layer.self_attn.rotary_emb
            now.rotary[index] = {
                name: rotary.get_buffer(name).clone() for name in ("cos", "sin") if hasattr(rotary, name)
            }
        self.passes.append(now)
        return now


@contextmanager
def recording(llm):
    recorder = Recorder(llm)
    runner, model, whole = recorder.runner, recorder.model, engine.model_of(llm)
    execute, adapter_forward, forward = runner.execute_model, runner.model.forward, model.forward
    compute_logits = whole.compute_logits

    def execute_model(scheduled, *args, **kwargs):
        recorder.schedule(scheduled)
        return execute(scheduled, *args, **kwargs)

    def called(*args, **kwargs):
        recorder.called_with = kwargs["attn_metadata"]
        return adapter_forward(*args, **kwargs)

    def recorded(input_ids, positions, *args, **kwargs):
        now = recorder.start_pass(input_ids, positions)
        hidden = forward(input_ids, positions, *args, **kwargs)
        now.hidden = hidden.clone()
        if now.metadata.is_prompt:
            now.kv = [(k.clone(), v.clone()) for k, v in engine.kv_cache_of(llm)]
        return hidden

    def logits(hidden, *args, **kwargs):
        recorder.passes[-1].read = hidden.clone()
        return compute_logits(hidden, *args, **kwargs)

    def attending(attend):
        def attended(layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs):
            inputs = [copy(tensor) for tensor in (query, key, value)]
            output = attend(layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)
            recorder.passes[-1].attention.append(
                Attention(*inputs, get_forward_context().attn_metadata, output.clone())
            )
            assert attn_metadata is get_forward_context().attn_metadata
            return output

        return attended

    def layer_hook(module, args, kwargs, output):
        entered = args[1] if len(args) > 1 else kwargs["hidden_states"]
        entry = (entered, kwargs.get("per_layer_input"), *output)
        recorder.passes[-1].layers.append(tuple(map(copy, entry)))

    runner.execute_model, runner.model.forward, model.forward = execute_model, called, recorded
    whole.compute_logits = logits
    hooks = []
    for layer in recorder.layers:
        impl = layer.self_attn.attn.impl
        impl.forward = attending(impl.forward)
        hooks.append(layer.register_forward_hook(layer_hook, with_kwargs=True))
        if layer.self_attn.is_kv_shared_layer:
            for cache in (impl.k_cache, impl.v_cache):
                hooks.append(cache.register_forward_pre_hook(lambda m, args: recorder.shared_writes.append(m)))
    try:
        yield recorder
    finally:
        del runner.execute_model, runner.model.forward, model.forward, whole.compute_logits
        for layer in recorder.layers:
            del layer.self_attn.attn.impl.forward
        for hook in hooks:
            hook.remove()


@dataclass
class Recorded:
    settings: str
    llm: Any
    passes: list[Pass]
    marked: list[Pass]
    contents: list[Any]  # of the marked passes, logits_positions
    outputs: list[tuple[list[int], list[int]]]  # of each request, prompt and output
    layer_types: list[str]
    shared_writes: list[Any]

    @property
    def prompt_passes(self) -> list[Pass]:
        return [p for p in self.passes if p.metadata.is_prompt]

    @property
    def with_context(self) -> list[tuple[Pass, Span]]:
        return [(p, span) for p in self.prompt_passes for _, span in p.spans() if span.start]

    @property
    def layers(self) -> list[Any]:
        return engine.layers_of(self.llm)


def play_marked(llm, contents):
    """The runner marks each prompt pass, in the field by which the package has it say how a pass is read."""
    runner = engine.runner_of(llm)
    form = runner._form_prefill_batch

    def form_prefill_batch(batch_contents):
        positions = [list(p) for p in batch_contents.logits_positions]
        batch = form(batch_contents)
        for metadata in batch.attn_metadata:
            contents.append(positions)
            metadata.prep_initial_states = True
        return batch

    runner._form_prefill_batch = form_prefill_batch
    try:
        with recording(llm) as recorder:
            play(llm, [Request(prompt_of(n, 9), max_tokens=1) for n in (60, 300)])
    finally:
        del runner._form_prefill_batch
    return [p for p in recorder.passes if p.metadata.is_prompt]


@pytest.fixture(scope="module", params=SETTINGS)
def run(request, tmp_path_factory):
    layers, engine_args = SETTINGS[request.param]
    checkpoint = make_checkpoint(
        tmp_path_factory.mktemp("checkpoint"), sliding_window=WINDOW, num_key_value_heads=2, **layers
    )
    llm = engine.make_llm(checkpoint, fast=False, prompt_batch_cap=4, num_gpu_blocks_override=40, **engine_args)
    contents: list[Any] = []
    try:
        with recording(llm) as recorder:
            outputs = []
            for batch in BATCHES:
                played = play(llm, [Request(prompt, max_tokens=4) for prompt in batch])
                outputs += [(p, list(o.outputs[0].token_ids)) for p, o in zip(batch, played, strict=True)]
        marked = play_marked(llm, contents)
        yield Recorded(
            request.param,
            llm,
            recorder.passes,
            marked,
            contents,
            outputs,
            layers["layer_types"],
            recorder.shared_writes,
        )
    finally:
        engine.close(llm)


def test_the_passes_are_of_all_kinds(run):
    """Else what follows would show nothing."""
    rows = [p.rows for p in run.prompt_passes]
    starts = [span.start for _, span in run.with_context]
    assert any(len([r for r in row if r]) > 1 for row in rows)
    assert any(start > WINDOW for start in starts)
    assert any(start % BLOCK for start in starts)
    if run.settings == ASYNC:
        assert [span.end for _, span in run.with_context if span.start == 2 * BLOCK][-1] == 2 * BLOCK + 70
        assert {256, 512} <= set(starts)
    else:
        assert any(None in row for row in rows)  # three prompts in a bucket of four


def test_a_pass_holds_prompts_only_or_decodes_only(run):
    decoded = {(token, len(p) + i) for p, output in run.outputs for i, token in enumerate(output)}
    for p in run.passes:
        if p.metadata.is_prompt:
            assert p.spans()
        else:
            ids, positions = p.input_ids.view(-1).tolist(), p.positions.view(-1).tolist()
            assert p.positions.shape[1] == 1
            assert (ids[0], positions[0]) in decoded
    # Each token that is scheduled is in one prompt pass of its step.
    spans = [(tuple(s.sequence.prompt), s.start, s.end) for p in run.prompt_passes for _, s in p.spans()]
    assert len(spans) == len(set(spans))
    for prompt, _ in run.outputs:
        mine = sorted((start, end) for tokens, start, end in spans if list(tokens) == prompt)
        assert mine[-1][1] == len(prompt)
        assert all(end == start for (_, end), (start, _) in zip(mine, mine[1:], strict=False))


def test_ids_are_flat_and_positions_have_a_row_per_sequence(run):
    for p in run.prompt_passes:
        batch, padded_len = p.positions.shape
        assert p.input_ids.shape == (batch * padded_len,)
        assert p.metadata.slot_mapping.shape == (batch, padded_len)
        assert p.metadata.seq_lens_tensor.shape == (batch,)
        assert p.hidden.shape == (batch * padded_len, run.llm.model_config.get_hidden_size())
        assert padded_len % BLOCK == 0


def test_real_tokens_come_first_in_their_row(run):
    """Where the padding is: real tokens of all rows are as many as are scheduled, and `rows` finds them in front."""
    for p in run.prompt_passes:
        ids = p.input_ids.view(p.positions.shape)
        for row, span in enumerate(p.rows):
            count = span.count if span else 0
            assert (ids[row, :count] >= 0).all()
            assert (ids[row, count:] <= 0).all()  # -1 or a padding token


def test_positions_are_those_in_the_prompt(run):
    for p in run.prompt_passes:
        for row, span in p.spans():
            assert p.positions[row, : span.count].tolist() == list(range(span.start, span.end))


def test_seq_lens_are_the_lengths_of_this_pass_and_zero_for_padding(run):
    for p in run.prompt_passes:
        assert p.metadata.seq_lens_tensor.tolist() == [span.count if span else 0 for span in p.rows]
        assert p.metadata.context_lens_tensor.tolist() == [span.start if span else 0 for span in p.rows]


def test_slots_are_those_of_the_block_table_and_padding_has_none(run):
    for p in run.prompt_passes:
        assert p.metadata.block_size == BLOCK
        for row, span in enumerate(p.rows):
            slots = p.metadata.slot_mapping[row].tolist()
            count = span.count if span else 0
            if span:
                assert slots[:count] == span.slots[span.start :].tolist()
            assert not {slot // BLOCK for slot in slots[count:]} & p.held


def test_slots_hold_keys_and_values_of_their_tokens(run):
    """After the pass as after the layer: no KV-shared layer has written anything else."""
    for p in run.prompt_passes:
        for layer, attention, kv in zip(run.layers, p.attention, p.kv, strict=True):
            if layer.self_attn.is_kv_shared_layer:
                continue
            for new, cache in zip((attention.key, attention.value), kv, strict=True):
                new = new.view(*p.positions.shape, *cache.shape[1:])
                for row, span in p.spans():
                    assert torch.equal(new[row, : span.count], cache[span.slots[span.start :]])


def test_metadata_is_one_namedtuple_for_all_layers(run):
    for p in run.passes:
        assert isinstance(p.metadata, tuple)
        assert not isinstance(p.metadata, dict)
        assert len(p.attention) == len(run.layers)
        assert len({id(a.metadata) for a in p.attention}) == 1
        # The package branches on these: values, not tensors, so that they are part of a graph's key as they are.
        assert type(p.metadata.is_prompt) is bool
        assert type(p.metadata.block_size) is int
        for value in (p.metadata.block_list, p.metadata.window_block_list, p.metadata.window_attn_bias):
            assert value is None or isinstance(value, torch.Tensor)


def test_block_lists_are_there_with_context_only(run):
    for p in run.prompt_passes:
        has_context = any(span.start for _, span in p.spans())
        for blocks in (p.metadata.block_list, p.metadata.window_block_list):
            assert (blocks is not None) == has_context
            if has_context:
                assert blocks.dim() == 1
                assert blocks.dtype in (torch.int32, torch.int64)


def test_a_row_with_context_is_alone_in_its_pass(run):
    assert run.with_context
    for p, span in run.with_context:
        assert p.rows == [span]


def test_without_context_full_layers_have_no_mask(run):
    for p in run.prompt_passes:
        if not any(span.start for _, span in p.spans()):
            assert p.metadata.attn_bias is None
            assert p.metadata.window_attn_bias is not None


def visible_by_hand(keys, queries, sliding, start):
    """[queries, keys], both given by their positions, -1 for a key that is no token of the sequence's."""
    distance = queries[:, None] - keys
    # In the past, the sliding layers' mask shows one token more than the window.
    reach = torch.where(keys < start, WINDOW + 1, WINDOW)
    return (keys >= 0) & (distance >= 0) & ((distance < reach) if sliding else True)


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_with_context_the_mask_over_context_and_pass_shows(run, kind):
    for p, span in run.with_context:
        sliding = kind == "sliding"
        blocks = p.metadata.window_block_list if sliding else p.metadata.block_list
        bias = p.metadata.window_attn_bias if sliding else p.metadata.attn_bias
        frame = len(blocks) * BLOCK
        assert bias.shape == (1, 1, p.padded_len, frame + p.padded_len)
        position_of = torch.full(p.kv[0][0].shape[:1], -1)
        position_of[span.slots] = torch.arange(span.end)
        past = (blocks.long()[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
        this = p.metadata.slot_mapping[0]
        # A block id of -1 is padding. What stands behind the past in its last block is of this pass: hidden here.
        keys_of_past = torch.where(past >= 0, position_of[past.clamp(min=0)], -1)
        keys_of_past = torch.where(keys_of_past < span.start, keys_of_past, -1)
        keys_of_this = torch.where(this >= 0, position_of[this.clamp(min=0)], -1)
        queries = torch.arange(span.start, span.end)
        expected = visible_by_hand(torch.cat((keys_of_past, keys_of_this)), queries, sliding, span.start)
        seen = bias[0, 0, : span.count]
        assert torch.equal(seen == 0, expected)
        assert (seen[~expected] < HIDDEN).all()
        # The frame lacks nothing that a row is to see.
        everything = visible_by_hand(torch.arange(span.end), queries, sliding, span.start)
        assert torch.equal(expected.sum(1), everything.sum(1))


def test_layers_attend_to_what_their_kind_of_mask_shows(run):
    """Real rows of every layer, by hand from its queries and the KV cache: full layers causally, sliding ones in their
    window; head h reads KV head h // (heads / KV heads); scores are not scaled."""
    for p in run.prompt_passes:
        for layer, kind, attention, (keys, values) in zip(run.layers, run.layer_types, p.attention, p.kv, strict=True):
            head_size = keys.shape[-1]
            queries = attention.query.view(*p.positions.shape, -1, head_size)
            outputs = attention.output.view_as(queries)
            group = queries.shape[2] // keys.shape[1]
            assert group == 4
            for row, span in p.spans():
                key, value = (x[span.slots].repeat_interleave(group, dim=1) for x in (keys, values))
                scores = torch.einsum("qhd,khd->hqk", queries[row, : span.count], key)
                at = torch.arange(span.end)
                visible = visible_by_hand(at, at[span.start :], kind == SLIDING, span.start)
                weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
                expected = torch.einsum("hqk,khd->qhd", weights, value)
                torch.testing.assert_close(outputs[row, : span.count], expected, rtol=1e-4, atol=1e-4)
            impl = layer.self_attn.attn.impl
            assert impl.sliding_window == (WINDOW if kind == SLIDING else None)
            assert (impl.scale, impl.num_heads, impl.num_kv_heads, impl.head_size) == (1.0, 8, 2, head_size)


def test_kv_cache_is_four_tensors_of_slots(run):
    for layer in run.layers:
        keys, values, *scales = layer.self_attn.attn.kv_cache
        assert type(layer.self_attn.attn.kv_cache) is tuple
        assert scales == [None, None]
        assert keys.shape == values.shape == (41 * BLOCK, 2, layer.self_attn.head_dim)  # 40 blocks, and the pad block


def test_kv_shared_layers_hold_their_targets_tensors_and_never_write(run):
    own = [layer for layer in run.layers if not layer.self_attn.is_kv_shared_layer]
    assert len(run.layers) - len(own) == 2
    for index, kind in enumerate(run.layer_types):
        attention = run.layers[index].self_attn.attn
        assert attention.impl.kv_sharing_target_layer_name == attention.kv_sharing_target_layer_name
        if index < len(own):
            assert attention.kv_sharing_target_layer_name is None
            continue
        target = run.layers[max(i for i in range(len(own)) if run.layer_types[i] == kind)].self_attn.attn
        assert attention.kv_sharing_target_layer_name == target.layer_name
        assert all(a is b for a, b in zip(attention.kv_cache, target.kv_cache, strict=True))
    assert not run.shared_writes


def test_cache_module_writes_and_reads_slots(run):
    """As the package calls it, also where contiguous paged attention would read the first slots instead."""
    from vllm_gaudi.attention.backends.hpu_attn import _set_fetch_by_id

    slots = torch.tensor([5 * BLOCK + 3, 2 * BLOCK, 7 * BLOCK + 127])
    for layer in run.layers:
        keys, *_ = layer.self_attn.attn.kv_cache
        cache, new = torch.zeros_like(keys), torch.randn(3, *keys.shape[1:])
        module = layer.self_attn.attn.impl.k_cache
        module(new, cache, slots, scales=None, block_size=BLOCK, is_prompt=True)
        assert torch.equal(cache[slots], new)
        assert int(cache.any(-1).any(-1).sum()) == 3
        _set_fetch_by_id(module, True)
        assert torch.equal(module.fetch_from_cache(cache, slots), new)


def test_runner_reads_the_last_row_of_each_sequence(run):
    """Row i * padded_len + len - 1; without asynchronous scheduling none of a chunk that its prompt goes on after."""
    for p in run.prompt_passes:
        read = [
            row * p.padded_len + span.count - 1
            for row, span in p.spans()
            if run.settings == ASYNC or span.end == len(span.sequence.prompt)
        ]
        rows = p.hidden[:0] if p.read is None else p.read
        assert torch.equal(rows, p.hidden[read])


def test_a_mark_at_the_runner_reaches_the_model_as_an_argument_of_the_adapter(run):
    """`prep_initial_states`, which is not set otherwise; and `logits_positions` are the rows that are read, by
    sequence."""
    assert all(not p.metadata.prep_initial_states for p in run.prompt_passes)
    assert len(run.marked) == len(run.contents) > 1
    for p, positions in zip(run.marked, run.contents, strict=True):
        assert p.metadata.prep_initial_states is True
        assert p.called_with.prep_initial_states is True
        read = [row * p.padded_len + at for row, of_row in enumerate(positions) for at in of_row]
        rows = p.hidden[:0] if p.read is None else p.read
        assert torch.equal(rows, p.hidden[read])
        assert all(of_row in ([], [span.count - 1]) for of_row, (_, span) in zip(positions, p.spans(), strict=True))


def cos_sin_by_hand(positions, width, theta=10000.0):
    angles = positions.double()[:, None] * theta ** (-torch.arange(0, width, 2).double() / width)
    return [f(torch.cat((angles, angles), dim=-1)).float()[:, None] for f in (torch.cos, torch.sin)]


def test_cos_and_sin_are_prepared_for_all_rows_in_flat_order_for_sliding_layers_only(run):
    for p in run.prompt_passes:
        flat = p.positions.flatten()
        for index, kind in enumerate(run.layer_types):
            assert sorted(p.rotary[index]) == (["cos", "sin"] if kind == SLIDING else [])
            for expected, prepared in zip(
                cos_sin_by_hand(flat, run.layers[index].self_attn.head_dim), p.rotary[index].values(), strict=False
            ):
                assert prepared.shape == expected.shape  # [tokens, 1, rotary_dim]
                real = flat >= 0
                torch.testing.assert_close(prepared[real], expected[real], rtol=1e-4, atol=1e-4)


def test_rotary_embeddings_of_some_rows_are_rows_of_the_whole(run):
    """Sliding layers go by the cos and sin they hold and ignore positions; full layers go by positions."""
    positions, rows = torch.arange(300, 300 + BLOCK, dtype=torch.int32).view(1, -1), torch.tensor([7, 0, 99])
    for layer, kind in zip(run.layers, run.layer_types, strict=True):
        rotary, width = layer.self_attn.rotary_emb, layer.self_attn.head_dim
        query, key = torch.randn(BLOCK, 8 * width), torch.randn(BLOCK, 2 * width)
        try:
            if kind == SLIDING:
                rotary.prepare_cos_sin(positions)
            whole = rotary(positions, query, key)
            other = rotary(positions + 1, query, key)
            assert all(torch.equal(a, b) == (kind == SLIDING) for a, b in zip(whole, other, strict=True))
            if kind == SLIDING:
                rotary.cos, rotary.sin = rotary.cos[rows], rotary.sin[rows]
            some = rotary(positions.view(-1, 1)[rows], query[rows], key[rows])
            for reduced, full in zip(some, whole, strict=True):
                torch.testing.assert_close(reduced, full[rows], rtol=1e-5, atol=1e-5)
        finally:
            for name in ("cos", "sin"):
                if hasattr(rotary, name):
                    delattr(rotary, name)


def test_layers_follow_each_other_and_the_norm_comes_last(run):
    model = engine.text_model_of(run.llm)
    for p in run.prompt_passes:
        states = model.embed_tokens.weight[p.input_ids.clamp(min=0).long()] * 96**0.5
        real = p.input_ids >= 0
        for entered, _, left, residual in p.layers:
            torch.testing.assert_close(entered[real], states[real], rtol=1e-4, atol=1e-4)
            assert residual is None
            states = left
        variance = states.pow(2).mean(-1, keepdim=True)
        normed = states * torch.rsqrt(variance + 1e-6) * model.norm.weight
        torch.testing.assert_close(p.hidden[real], normed[real], rtol=1e-3, atol=1e-3)


def test_each_layer_gets_its_own_slice_of_the_per_layer_inputs(run):
    """The layers' rows in the fused weights stand one after the other, in the order of the layers."""
    model, width, count = engine.text_model_of(run.llm), 16, len(run.layers)
    table = model.embed_tokens_per_layer.weight.view(-1, count, width)
    weight = model.per_layer_model_projection.weight.view(count, width, -1)
    for p in run.prompt_passes:
        real = p.input_ids >= 0
        ids = p.input_ids[real].long()
        embedded = model.embed_tokens.weight[ids] * 96**0.5
        for index, (_, per_layer_input, *_) in enumerate(p.layers):
            projected = embedded @ weight[index].T * 96**-0.5
            projected = projected * torch.rsqrt(projected.pow(2).mean(-1, keepdim=True) + 1e-6)
            projected = projected * model.per_layer_projection_norm.weight
            expected = (projected + table[ids, index] * width**0.5) * 0.5**0.5
            torch.testing.assert_close(per_layer_input[real], expected, rtol=1e-3, atol=1e-3)
