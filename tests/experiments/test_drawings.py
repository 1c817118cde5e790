"""Pictures of memory, of prefix trees and of requests over time: what they show, counted by hand."""

from itertools import pairwise

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from paged_jax.config import EngineConfig
from paged_jax.experiments.drawings.memory import Block, draw_memory, look
from paged_jax.experiments.drawings.prefix_tree import draw_prefix_tree
from paged_jax.experiments.drawings.timeline import (
    EventList,
    Span,
    activity_legend,
    draw_timeline,
    seconds_by_activity,
    spans_of,
)
from paged_jax.sampling.params import SamplingParams
from paged_jax.simulation.engines import simulated_engine


def engine_of(**settings):
    config = {"block_size": 4, "num_blocks": 8, "max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    return simulated_engine("tiny-llama", "this-cpu", EngineConfig(**config | settings))


def greedy(length, seed=90):
    return SamplingParams(max_tokens=length, temperature=0, seed=seed, ignore_eos=True)


def words_of(ax):
    return [text.get_text() for text in ax.texts]


def test_memory_names_owners_contents_and_cached_blocks():
    engine = engine_of()
    engine.add_request("A", [1, 2, 3, 4, 5], greedy(2))
    engine.step()
    memory = look(engine)
    # five tokens are computed; the sixth was chosen and is computed next
    assert memory.tables == {"A": (1, 2)}
    assert memory.blocks[:3] == (Block(("A",), (1, 2, 3, 4), True), Block(("A",), (5,), False), Block((), (), False))
    assert len(memory.blocks) == 8

    two = SamplingParams(n=2, max_tokens=3, temperature=1, seed=90, ignore_eos=True)
    engine.add_request("B", [1, 2, 3, 4, 6], two)
    engine.step()  # A ends, and B's prompt finds A's first block
    memory = look(engine)
    assert memory.tables == {"B": (1, 3), "B/1": (1, 3)}
    assert memory.blocks[0].owners == memory.blocks[2].owners == ("B", "B/1")
    assert memory.blocks[2].token_ids == (6,)

    engine.step()  # copy-on-write: the samples differ in their first tokens, 90 and 91
    memory = look(engine)
    own, other = (memory.blocks[table[1] - 1] for table in memory.tables.values())
    assert (own.owners, own.token_ids) == (("B",), (6, 90))
    assert (other.owners, other.token_ids) == (("B/1",), (6, 91))

    while engine.has_unfinished_requests():
        engine.step()
    memory = look(engine)
    assert memory.tables == {}
    assert memory.blocks[0] == Block((), (1, 2, 3, 4), True)


def test_a_drawing_of_memory_shows_every_moment_block_and_token():
    engine = engine_of()
    engine.add_request("A", [1, 2, 3, 4, 5], greedy(8))
    moments = {}
    for step in "first", "second":
        engine.step()
        moments[step] = look(engine)
    figure = draw_memory(moments, lambda token: f"t{token}", columns=2)
    assert [ax.get_title(loc="left") for ax in figure.axes[::2]] == ["first", "second"]
    assert words_of(figure.axes[0]) == ["A", "1", "2"]
    tokens = [[word for word in words_of(ax) if word.startswith("t")] for ax in figure.axes[1::2]]
    assert tokens == [["t1", "t2", "t3", "t4", "t5"], ["t1", "t2", "t3", "t4", "t5", "t90"]]
    assert words_of(figure.axes[1]).count("free") == 6


@pytest.mark.parametrize("cache", ["radix", "hash"])
def test_a_tree_has_a_box_for_each_block_and_a_line_to_what_it_follows(cache):
    engine = engine_of(prefix_cache=cache)
    for name, prompt in {"A": [1, 2, 3, 4, 5, 6, 7, 8], "B": [1, 2, 3, 4, 9, 9, 9, 9]}.items():
        engine.add_request(name, prompt, greedy(1))
        engine.step()
    engine.add_request("C", [1, 2, 3, 4, 7], greedy(5))
    engine.step()
    (cached,), (pool,) = engine.scheduler.kv_cache.caches, engine.scheduler.kv_cache.pools
    ax = Figure().subplots()
    draw_prefix_tree(cached, pool, ax, notes={2: "noted"})
    boxes = {}
    for box in ax.patches:
        assert isinstance(box, Rectangle)
        assert box.get_width() == 4
        boxes[box.get_x(), box.get_y()] = box.get_facecolor()
    assert len(boxes) == 3
    # of three blocks the common one is in use, and the two that follow begin at one place, one below the other
    (root, *leaves) = sorted(boxes)
    assert boxes[root] != boxes[leaves[0]] == boxes[leaves[1]]
    assert leaves[0][0] == leaves[1][0] > root[0] + 4
    assert [w for w in words_of(ax) if "block" in w] == ["block 1 (1 user)", "block 2 noted", "block 3"]
    middle = {box: box[1] + 0.22 for box in boxes}
    assert middle[root] == pytest.approx((middle[leaves[0]] + middle[leaves[1]]) / 2)
    lines = [line.get_xydata().ravel().tolist() for line in ax.lines if len(line.get_xydata()) == 2]
    assert len(lines) == 3
    for leaf in leaves:  # from the end of the common block
        assert pytest.approx([root[0] + 4, middle[root], leaf[0], middle[leaf]]) in lines


def test_a_drawing_of_nothing_says_so():
    engine = engine_of()
    (cached,), (pool,) = engine.scheduler.kv_cache.caches, engine.scheduler.kv_cache.pools
    ax = Figure().subplots()
    draw_prefix_tree(cached, pool, ax)
    assert words_of(ax) == ["empty"]
    (left, _) = draw_memory({"before": look(engine)}).axes
    assert words_of(left) == ["nobody runs"]


EVENTS = [
    {"event": "header"},
    {"event": "arrival", "t": 0.0, "id": "A"},
    {"event": "arrival", "t": 1.0, "id": "B", "arrival_time": 0.5},
    {"event": "step", "t": 1.0},
    {"event": "schedule", "t": 1.0, "chunks": [["A", 0, 8]], "admitted": [["A", 0]]},
    {"event": "result", "t": 2.0},
    {"event": "token", "t": 2.0, "id": "A", "tokens": [1]},
    {"event": "step", "t": 2.0},
    {"event": "schedule", "t": 2.0, "decodes": ["A"], "chunks": [["B", 0, 4]], "admitted": [["B", 1], [["B", 1], 2]]},
    {"event": "result", "t": 4.0},
    {"event": "token", "t": 4.0, "id": "B", "tokens": [1]},
    {"event": "step", "t": 4.0},
    {"event": "preempt", "t": 4.0, "id": "B", "how": "swap"},
    {"event": "schedule", "t": 4.0, "decodes": ["A", ["B", 1]], "preempted": ["B"]},
    {"event": "result", "t": 5.0},
    {"event": "step", "t": 5.0},
    {"event": "schedule", "t": 5.0, "idle": ["A"], "chunks": [["B", 4, 1]], "admitted": [["B", 3]]},
    {"event": "result", "t": 6.0},
    {"event": "step", "t": 6.0},
    {"event": "preempt", "t": 6.0, "id": "B", "how": "recompute"},
    {"event": "schedule", "t": 6.0, "idle": ["A"], "preempted": ["B"]},
    {"event": "result", "t": 7.0},
    {"event": "step", "t": 7.0},
    {"event": "schedule", "t": 7.0, "chunks": [["B", 0, 6]], "admitted": [["B", 1]]},
    {"event": "result", "t": 8.0},
    {"event": "step", "t": 9.0},
    {"event": "schedule", "t": 9.0, "decodes": ["B"]},
    {"event": "result", "t": 10.0},
    {"event": "step", "t": 10.0},  # nothing is left to plan, so that it comes back before any time has passed
    {"event": "preempt", "t": 10.0, "id": "B", "how": "swap"},
    {"event": "schedule", "t": 10.0, "preempted": ["B"]},
    {"event": "step", "t": 10.0},
    {"event": "schedule", "t": 10.0, "chunks": [["B", 7, 1]], "admitted": [["B", 0]]},
    {"event": "result", "t": 11.0},
]


def test_spans_tell_what_each_request_did_when():
    spans = spans_of(EVENTS)
    assert [span for span in spans if span.request == "A"] == [
        Span("A", None, "waiting", 0.0, 1.0),
        Span("A", 0, "prefill", 1.0, 2.0),
        Span("A", 0, "decode", 2.0, 5.0),
        Span("A", 0, "idle", 5.0, 7.0),
    ]
    assert [span for span in spans if span.request == "B"] == [
        Span("B", None, "waiting", 0.5, 2.0),
        Span("B", 1, "prefill", 2.0, 4.0),
        Span("B", None, "swapped", 4.0, 5.0),
        Span("B", 3, "decode", 5.0, 6.0),  # it came back with its keys and values: one token, no prompt
        Span("B", None, "preempted", 6.0, 7.0),
        Span("B", 1, "prefill", 7.0, 8.0),
        Span("B", 1, "waiting", 8.0, 9.0),  # it has its place, and was left out
        Span("B", 1, "decode", 9.0, 10.0),
        Span("B", 0, "decode", 10.0, 11.0),  # in another row
    ]
    assert [span for span in spans if span.request == "B/1"] == [Span("B/1", 2, "decode", 4.0, 5.0)]
    assert seconds_by_activity(spans) == {
        "waiting": 3.5, "prefill": 4.0, "decode": 7.0, "idle": 2.0, "swapped": 1.0, "preempted": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_spans_of_a_recorded_run_add_up_to_its_times(mode):
    # prompts of 8 fill two blocks each, and of the third that each wants there is one: B gives way until A has ended
    engine, log = engine_of(num_blocks=5, prefix_cache="none", preemption_mode=mode), EventList()
    engine.record(log)
    a, b = (engine.add_request(name, range(10 * i, 10 * i + 8), greedy(4)) for i, name in enumerate("AB"))
    while engine.has_unfinished_requests():
        engine.step()
    spans = [span for span in spans_of(log.events) if span.request == "B"]
    waits = "swapped" if mode == "swap" else "preempted"
    again = [] if mode == "swap" else ["prefill"]
    assert [span.activity for span in spans] == ["prefill", waits, *again, "decode"]
    assert spans[1].end == pytest.approx(a.metrics.finished_time)
    assert spans[-1].end == pytest.approx(b.metrics.finished_time)
    assert all(before.end == after.start for before, after in pairwise(spans))


def test_a_timeline_has_a_row_for_each_request_or_slot():
    spans = spans_of(EVENTS)
    by_request, by_slot = Figure().subplots(2)
    draw_timeline(spans, by_request)
    assert [label.get_text() for label in by_request.get_yticklabels()] == ["A", "B", "B/1"]
    bars = [(round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width()) for bar in by_request.patches]
    rows = {"A": 0, "B": 1, "B/1": 2}
    assert bars == [(rows[span.request], span.start, span.end - span.start) for span in spans]

    draw_timeline(spans, by_slot, by="slot", end=20)
    assert [label.get_text() for label in by_slot.get_yticklabels()] == ["0", "1", "2", "3"]
    tenants = sorted((text.get_position(), text.get_text()) for text in by_slot.texts)
    assert tenants == [((1.0, 0), "A"), ((2.0, 1), "B"), ((4.0, 2), "B/1"), ((5.0, 3), "B"), ((10.0, 0), "B")]
    assert by_slot.get_xlim() == (0, 20)
    labels = [patch.get_label() for patch in activity_legend(spans)]
    assert labels == ["waiting", "prefill", "decode", "idle", "preempted", "swapped"]
