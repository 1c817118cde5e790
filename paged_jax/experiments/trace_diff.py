"""Where two recorded runs part, and what that amounts to."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from paged_jax.engine.recorder import Event
from paged_jax.experiments.totals import Totals, totals_table
from paged_jax.experiments.trace import INPUTS, Trace, counted, shown

_MOST_SHOWN = 12
"""Names listed where both runs agree."""


@dataclass
class _Step:
    """What was decided in one step, or before the first."""

    number: int = 0
    start: float = 0.0
    decisions: list[Event] = field(default_factory=list)
    """Without times and checksums."""


def diff(a: Trace, b: Trace) -> str:
    """The first step at which two runs part, the step before it, and totals from there on and over all.

    Times do not count, decisions do: who is scheduled, admitted, preempted, with which tokens, blocks and slots.
    """
    text = "".join(f"note: {trace.note}\n" for trace in (a, b) if trace.note)
    text += f"A: {a.path}\nB: {b.path}\n{_settings(a, b)}{_arrivals(a, b)}\n"
    before: _Step | None = None
    for ours, theirs in zip_longest(_steps(a), _steps(b)):
        if ours is None or theirs is None or ours.decisions != theirs.decisions:
            number = (ours or theirs).number
            text += f"{_show(before, before)}\n" if before is not None and before.number else ""
            text += f"{_show(ours, theirs)}\n"
            text += totals_table(f"from step {number} on", _totals(a, b, number)).terminal() + "\n"
            return text + totals_table("over all", _totals(a, b, 0)).terminal()
        before = ours
    count = before.number if before is not None else 0
    table = totals_table("over all", _totals(a, b, 0)).terminal()
    same = "the one step is the same" if count == 1 else f"all {count} steps are the same"
    return f"{text}{same}\n\n{table}"


def _steps(trace: Trace) -> Iterator[_Step]:
    step = _Step()
    for event in trace.events():
        kind = event["event"]
        if kind == "step":
            yield step
            step = _Step(event["step"], event["t"])
        elif kind not in INPUTS and kind != "result":
            step.decisions.append({key: value for key, value in event.items() if key not in ("t", "check")})
    yield step


def _settings(a: Trace, b: Trace) -> str:
    """The settings that differ, a line each."""
    plain = [{**trace.header["config"], "trace_file": None, **_given(trace)} for trace in (a, b)]
    lines = [
        f"  {key}: {plain[0].get(key)} | {plain[1].get(key)}\n"
        for key in dict.fromkeys([*plain[0], *plain[1]])
        if plain[0].get(key) != plain[1].get(key)
    ]
    return f"settings that differ, A | B:\n{''.join(lines)}" if lines else "the settings are the same\n"


def _given(trace: Trace) -> dict[str, Any]:
    names = ("num_blocks", "num_swap_blocks", "max_model_len", "vocab_size", "eos_token_ids", "cache_groups")
    return {name: trace.header[name] for name in names}


def _arrivals(a: Trace, b: Trace) -> str:
    """Whether the runs were given the same requests, times aside."""
    sides = [
        sorted(
            ({key: value for key, value in p.arrival.items() if key not in ("t", "arrival_time")} for p in t.prompts),
            key=lambda arrival: arrival["id"],
        )
        for t in (a, b)
    ]
    if sides[0] == sides[1]:
        count = len(sides[0])
        return f"the same {counted(count, 'request')} arrive{'s' * (count == 1)}\n"
    named = [{arrival["id"]: arrival for arrival in side} for side in sides]
    lines = []
    for name in dict.fromkeys([*named[0], *named[1]]):
        ours, theirs = named[0].get(name), named[1].get(name)
        if ours is None or theirs is None:
            lines.append(f"{name!r} arrives only in {'B' if ours is None else 'A'}")
        elif ours != theirs:
            keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
            lines.append(f"{name!r} has another {', '.join(keys)}")
    shown_lines = "".join(f"  {line}\n" for line in lines[:_MOST_SHOWN])
    more = f"  and {len(lines) - _MOST_SHOWN} more\n" if len(lines) > _MOST_SHOWN else ""
    return f"different requests arrive ({len(sides[0])} in A, {len(sides[1])} in B):\n{shown_lines}{more}"


def _totals(a: Trace, b: Trace, first_step: int) -> dict[str, Totals]:
    columns = {}
    for name, trace in (("A", a), ("B", b)):
        columns[name] = totals = Totals(first_step)
        for event in trace.events():
            totals.write(event)
    return columns


def _show(a: _Step | None, b: _Step | None) -> str:
    """A step of both runs: a line for each kind of decision, two where they differ."""
    number = (a or b or _Step()).number
    title = f"step {number}" if number else "before the first step"
    if a is None or b is None:
        title += f" ({'A' if a is None else 'B'} has ended)"
    rows = [_rows(step) if step is not None else {} for step in (a, b)]
    lines = [f"{title}{', the same in both:' if a is b else ', where they part:'}"]
    for key in dict.fromkeys([*rows[0], *rows[1]]):
        ours, theirs = rows[0].get(key, []), rows[1].get(key, [])
        if ours == theirs or a is b:
            more = f", and {len(ours) - _MOST_SHOWN} more" if len(ours) > _MOST_SHOWN else ""
            lines.append(f"  {key:14}    {', '.join(ours[:_MOST_SHOWN])}{more}")
        else:
            lines.append(f"  {key:14} A  {', '.join(ours) or '-'}")
            lines.append(f"  {'':14} B  {', '.join(theirs) or '-'}")
    return "\n".join(lines) + "\n"


def _rows(step: _Step) -> dict[str, list[str]]:
    """A step's decisions by kind, in words."""
    rows: dict[str, list[str]] = {"starts at": [f"{step.start:.6g} s"]}

    def add(key: str, text: str) -> None:
        rows.setdefault(key, []).append(text)

    for event in step.decisions:
        name, group = shown(event.get("id", "")), f" of group {event['group']}" if event.get("group") else ""
        match event["event"]:
            case "schedule":
                rows["tokens"] = [str(event.get("num_tokens", 0))]
                for key in ("decodes", "forks", "idle"):
                    for scheduled in event.get(key, ()):
                        add(key, shown(scheduled))
                for scheduled, start, count in event.get("chunks", ()):
                    add("chunks", f"{shown(scheduled)} ({count} tokens from {start})")
                for scheduled, slot in event.get("admitted", ()):
                    add("admitted", f"{shown(scheduled)} (slot {slot})")
            case "preempt":
                add("preempted", f"{name} ({event['how']})")
            case "wait":
                add("finding no room", name)
            case "allocate":
                cached = f", {event['cached']} tokens cached" if event.get("cached") else ""
                add("blocks", f"{name} {_blocks(event['blocks'])} from number {event.get('first', 0)}{cached}")
            case "evict":
                add("evicted", f"block {event['block']}{group}")
            case "copy":
                add("copied", f"{event.get('source', 0)} to {event['target']}{group}")
            case "swap":
                add("swapped", f"{name} to the {event['to']}, {_blocks(event['device_blocks'])}, "
                    f"host {_blocks(event['host_blocks'])}")  # fmt: skip
            case "token":
                answer = event.get("tokens") or [token for token, _ in event["top"]]
                add("sampled", f"{name} {' '.join(map(str, answer))}")
            case "beam":
                add("beams", f"{name} after {shown(event['parent'])} with {event.get('token', 0)}")
            case "finish":
                stop = f" {event['stop']!r}" if "stop" in event else ""
                add("finished", f"{name} ({event['reason']}{stop}, {event.get('n', 0)} tokens)")
            case "retract":
                add("retracted", "the step's result was lost")
    return rows


def _blocks(groups: list[list[int]]) -> str:
    """Block ids of each cache group."""
    return " / ".join("[" + " ".join(map(str, blocks)) + "]" for blocks in groups)
