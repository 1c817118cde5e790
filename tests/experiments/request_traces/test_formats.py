"""Every format: a tiny file of each is read, and what is wrong in one is one sentence with file, line and remedy."""

import json
from pathlib import Path

import pytest
from host_executor import host_engine

from paged_jax.engine.engine import Arrival, drive
from paged_jax.experiments.request_traces.spec import TraceWorkload
from paged_jax.experiments.request_traces.workload import TraceRequest, trace_requests, workload_notes
from paged_jax.sampling.params import SamplingParams


class WordTokenizer:
    """A token for each word, which is its length, and one before all for the start of a text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [len(word) for word in text.split()]


def requests_of(tmp_path: Path, fmt: str, text: str, **fields: object) -> list[TraceRequest]:
    path = tmp_path / "trace.txt"
    path.write_bytes(text.encode())
    return trace_requests(TraceWorkload(kind="trace", format=fmt, file=str(path), **fields), 0, 97, WordTokenizer())


def lengths(requests: list[TraceRequest]) -> list[tuple[int, int]]:
    return [(len(r.prompt_token_ids), r.output_len) for r in requests]


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.68,5,2\r\n\r\n2023-11-16 18:15:47.68,7,3"
BURSTGPT = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    '5.0,1,3.5,"GPT-4",472,18,490,Conversation log\n45,,0.1,ChatGPT,1087,230,1317,API log\n'
)


@pytest.mark.parametrize(
    ("fmt", "text", "times", "expected"),
    [
        ("azure", AZURE, [0, 1], [(5, 2), (7, 3)]),
        ("azure", "\ufeff" + AZURE.replace("TIMESTAMP", '"Timestamp"'), [0, 1], [(5, 2), (7, 3)]),
        ("azure", "GeneratedTokens, TIMESTAMP,ContextTokens\n2, 0.5 ,5.0\n3,1e0, 7", [0, 0.5], [(5, 2), (7, 3)]),
        ("burstgpt", BURSTGPT, [0, 40], [(472, 18), (1087, 230)]),
        ("lengths", "TIMESTAMP,ContextTokens,GeneratedTokens\nXXX,5,2\n,7,3\n", [None] * 2, [(5, 2), (7, 3)]),
        ("lengths", "ContextTokens,GeneratedTokens\n5,2\n", [None], [(5, 2)]),
        ("lengths", "num_prefill_tokens,num_decode_tokens,pd_ratio\n5,2,2.5\n7,3,nan\n", [None] * 2, [(5, 2), (7, 3)]),
    ],
)
def test_columns(tmp_path, fmt, text, times, expected):
    requests = requests_of(tmp_path, fmt, text)
    assert [r.time for r in requests] == times
    assert lengths(requests) == expected


def mooncake(*rows: tuple[int, int, list[int]]) -> str:
    return "".join(
        json.dumps({"timestamp": t, "input_length": n, "output_length": 3, "hash_ids": ids}) + "\n"
        for t, n, ids in rows
    )


def test_prompts_of_mooncake_begin_alike_exactly_as_far_as_their_hash_ids_agree(tmp_path):
    rows = [
        (0, 1100, [46, 47, 48]),
        (1500, 1500, [46, 47, 49]),
        (3000, 1024, [46, 50]),
        (4500, 600, [51, 47]),  # the same block elsewhere
        (6000, 700, [46, 47]),  # a part of a block that is whole above
        (7500, 1100, [46, 47, 48]),
        (7500, 300, [2**62]),
    ]
    requests = requests_of(tmp_path, "mooncake", mooncake(*rows))
    assert [r.time for r in requests] == [0, 1.5, 3, 4.5, 6, 7.5, 7.5]
    assert lengths(requests) == [(n, 3) for _, n, _ in rows]
    for row, request in zip(rows, requests, strict=True):
        for other, another in zip(rows, requests, strict=True):
            agree = next(
                (i for i, (a, b) in enumerate(zip(row[2], other[2], strict=False)) if a != b),
                min(len(row[2]), len(other[2])),
            )
            whole = min(512 * agree, row[1], other[1])
            a, b = request.prompt_token_ids, another.prompt_token_ids
            assert a[:whole] == b[:whole]
            assert min(row[1], other[1]) == whole or a[whole : whole + 16] != b[whole : whole + 16]
    # where a block stands does not matter: 47 second and second again, 46 first only
    assert requests[3].prompt_token_ids[512:600] == requests[0].prompt_token_ids[512:600]
    assert len({t for r in requests for t in r.prompt_token_ids}) > 90, "all of the 97 ids occur"
    assert {type(t) for r in requests for t in r.prompt_token_ids} == {int}


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_prefix_caches_hit_as_far_as_hash_ids_agree(tmp_path, prefix_cache):
    rows = [(0, 1100, [1, 2, 3]), (10_000, 1300, [1, 2, 4]), (20_000, 600, [1, 3]), (30_000, 520, [2, 1])]
    engine = host_engine(
        num_blocks=300,
        block_size=16,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        prefix_cache=prefix_cache,
        seconds_per_step=1.0,
    )
    arrivals = [
        Arrival(r.time, str(i), r.prompt_token_ids, SamplingParams(max_tokens=r.output_len, ignore_eos=True))
        for i, r in enumerate(requests_of(tmp_path, "mooncake", mooncake(*rows)))
    ]
    served = {r.request_id: r.metrics for advanced, _ in drive(engine, arrivals, engine.clock) for r in advanced}
    assert [served[str(i)].num_cached_tokens for i in range(4)] == [0, 1024, 512, 0]


def test_answers_of_burstgpt_that_failed_are_left_out_and_counted(tmp_path):
    assert lengths(requests_of(tmp_path, "burstgpt", BURSTGPT + "50,,0,ChatGPT,10,0,10,API log\n")) == [
        (472, 18),
        (1087, 230),
    ]
    spec = TraceWorkload(kind="trace", format="burstgpt", file=str(tmp_path / "trace.txt"))
    assert any("1 of 3 rows with an empty prompt or no output is left out" in note for note in workload_notes(spec))


def conversation(*turns: tuple[str, str]) -> dict:
    return {"id": "x", "conversations": [{"from": speaker, "value": text} for speaker, text in turns]}


def test_sharegpt_takes_the_first_question_and_its_answer(tmp_path):
    conversations = [
        conversation(("human", "how are you"), ("gpt", "fine thanks"), ("human", "good"), ("gpt", "yes it is so")),
        conversation(("system", "be kind"), ("human", "a b"), ("gpt", "c")),
        conversation(("gpt", "cut off answer"), ("human", "go on please"), ("gpt", "so it goes on")),
        conversation(("human", "nobody answers")),
        conversation(),
    ]
    requests = requests_of(tmp_path, "sharegpt", json.dumps(conversations))
    assert [(r.time, r.prompt_token_ids, r.output_len) for r in requests] == [
        (None, (0, 3, 3, 3), 2),
        (None, (0, 1, 1), 1),
        (None, (0, 2, 2, 6), 4),
    ]


def test_prompts_of_lines_and_of_objects(tmp_path):
    output = {"law": "constant", "value": 5}
    assert [
        (r.prompt_token_ids, r.output_len)
        for r in requests_of(tmp_path, "prompts", "one two\n\n three\n", output=output)
    ] == [((0, 3, 3), 5), ((0, 5), 5)]
    objects = [
        {"question_id": 81, "turns": ["first turn", "second"]},
        {"question": "how many", "answer": "it is 4"},
        {"prompt": "x"},
    ]
    text = "\n".join(map(json.dumps, objects))
    assert lengths(requests_of(tmp_path, "prompts", text, output=output)) == [(3, 5), (3, 5), (2, 5)]
    assert lengths(requests_of(tmp_path, "prompts", json.dumps(objects[1]))) == [(3, 3)]
    with pytest.raises(ValueError, match=r"line 1: the prompt has no answer that says how long.*set workload\.output"):
        requests_of(tmp_path, "prompts", text)


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = '{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [0]}\n'
TURN = '[{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, '
REFUSED = {
    "columns of another format": ("azure", BURSTGPT, "line 1: there is no column ContextTokens"),
    "no header": (
        "azure",
        "0,5,2\n1,7,3\n",
        r"line 1: there is no column TIMESTAMP \(found: 0, 5, 2\): correct the header",
    ),
    "no such column": ("burstgpt", "Timestamp,Model,Request tokens\n0,x,1", "there is no column Response tokens"),
    "columns of no lengths": ("lengths", "a,b\n1,2\n", r"num_decode_tokens, and this file a, b: correct the header"),
    "times in lengths": (
        "lengths",
        HEADER + "XXX,5,2\n0.5,7,3\n",
        r"line 3: TIMESTAMP is '0.5', a time.*format 'azure'",
    ),
    "only a header": ("azure", HEADER, "has no rows under its header"),
    "nothing": ("azure", "", "has no rows under its header"),
    "no lines": ("mooncake", "\n", "is empty: correct workload.file"),
    "a short row": (
        "azure",
        HEADER + "0,5,2\n1,7",
        r"line 3: 2 cells under 3 columns: fetch the file again if it was cut",
    ),
    "a long row": ("azure", HEADER + "0,5,2,9\n", "line 2: 4 cells under 3 columns"),
    "an open quote": ("azure", HEADER + '0,5,2\n"1,7,3\n', r"no CSV \(unexpected end of data\): mend the row"),
    "a word": (
        "azure",
        HEADER + "0,5,2\n\n1,many,3\n",
        "line 4: ContextTokens is 'many', not a number: mend or delete",
    ),
    "a blank": ("lengths", HEADER + "XXX,5,\n", "line 2: GeneratedTokens is '', not a number"),
    "nan": ("azure", HEADER + "0,NaN,3\n", "line 2: ContextTokens is NaN, not a whole number of tokens"),
    "infinite": ("azure", HEADER + "0,inf,3\n", "line 2: ContextTokens is inf, not a whole number of tokens"),
    "a fraction": (
        "burstgpt",
        BURSTGPT.replace("1087", "10.87"),
        "line 3: Request tokens is 10.87, not a whole number",
    ),
    "negative": (
        "lengths",
        HEADER + "XXX,5,-2\n",
        "line 2: GeneratedTokens is -2, and a count of tokens is not negative",
    ),
    "underscore": ("azure", HEADER + "0,1_0,3\n", "line 2: ContextTokens is '1_0', not a number"),
    "a number without end": ("azure", HEADER + f"0,{'9' * 5000},3\n", r"line 2: ContextTokens is 1\.000e\+5000, more"),
    "a long exponent": ("azure", HEADER + "0,1e999999999,3\n", r"line 2: ContextTokens is 1e\+999999999, more tokens"),
    "other digits": ("azure", HEADER + "0,\u00b2,3\n", "line 2: ContextTokens is '\u00b2', not a number"),
    "a column twice": (
        "azure",
        "TIMESTAMP,ContextTokens,GeneratedTokens,contexttokens\n0,1,2,3",
        "two columns Context",
    ),
    "too many": ("azure", HEADER + "0,10000001,3\n", r"line 2: .* more tokens than any model takes \(10000000\): name"),
    "cut JSON": (
        "mooncake",
        GOOD + GOOD[:30],
        r"line 2 is no whole JSON value.*fetch the file again if it was cut short",
    ),
    "no object": ("mooncake", GOOD + "[1, 2]", "line 2 holds no JSON object: this format has one object a line"),
    "NaN in JSON": ("mooncake", GOOD.replace("4", "NaN"), "line 1: NaN is not a number: mend or delete the row"),
    "a key is missing": ("mooncake", '{"timestamp": 0, "input_length": 4}', "line 1: there is no output_length"),
    "a text in JSON": ("mooncake", GOOD.replace("4", '"many"'), "line 1: input_length is 'many', not a number"),
    "null in JSON": ("mooncake", GOOD.replace("4", "null"), "line 1: input_length is None, not a number"),
    "true in JSON": ("mooncake", GOOD.replace("4", "true"), "line 1: input_length is True, not a number"),
    "too few ids": (
        "mooncake",
        GOOD.replace("4", "513"),
        "line 1: 1 hash_ids for 513 tokens, where each stands for 512",
    ),
    "too many ids": ("mooncake", GOOD.replace("[0]", "[0, 1]"), "line 1: 2 hash_ids for 4 tokens"),
    "no ids": ("mooncake", GOOD.replace("[0]", '["a"]'), "line 1: hash_ids is not a list of whole numbers"),
    "negative id": ("mooncake", GOOD.replace("[0]", "[-1]"), "line 1: hash_ids is not a list of whole numbers"),
    "cut conversations": (
        "sharegpt",
        TURN + '{"conv',
        r"is no whole JSON value.*character \d+\): fetch the file again",
    ),
    "no list": ("sharegpt", "{}", "holds no list of conversations: choose the workload.format that fits"),
    "no conversation": ("sharegpt", TURN + "3]", r'conversation 2 has no list "conversations": mend or delete it'),
    "no turn": (
        "sharegpt",
        TURN + '{"conversations": [{"from": "gpt"}]}]',
        "conversation 2 has a turn without the texts",
    ),
    "no prompts": ("prompts", "\n \n", "is empty: correct workload.file"),
    "no prompt": ("prompts", '{"instruction": "a"}', r"line 1: none of prompt, question, text and turns is a text"),
    "no text": ("prompts", '{"prompt": 3}', r"line 1: none of prompt, question, text and turns is a text"),
    "no answer": ("prompts", '{"prompt": "a", "answer": 3}', "line 1: answer is not a text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_in_a_file_is_one_sentence_that_names_it(tmp_path, case):
    fmt, text, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence) as refused:
        requests_of(tmp_path, fmt, text)
    assert str(tmp_path / "trace.txt") in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_text_or_no_file_is_named(tmp_path):
    path = tmp_path / "trace.gz"
    path.write_bytes(b"\x1f\x8b\x08\xff")
    spec = TraceWorkload(kind="trace", format="azure", file=str(path))
    with pytest.raises(ValueError, match=r"trace.gz is not UTF-8 text \(byte 1\): unpack it"):
        trace_requests(spec, 0, 97, None)
    with pytest.raises(ValueError, match=r"cannot read the trace file .* \(Is a directory\)"):
        trace_requests(spec.model_copy(update={"file": str(tmp_path)}), 0, 97, None)
    with pytest.raises(
        ValueError, match=r"there is no trace file nowhere.csv: correct workload.file, or give.*stand_in"
    ):
        trace_requests(spec.model_copy(update={"file": "nowhere.csv"}), 0, 97, None)
