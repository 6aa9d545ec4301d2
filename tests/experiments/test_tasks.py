"""Recall streams, checked by an interpreter of the commands that knows nothing of how they are made."""

import re

import numpy as np
import pytest

from experiments import corpus, tasks

COMMAND = re.compile(
    rb"^(?:set (?P<set>\w\d)=(?P<value>[0-9a-f]{2});|get (?P<get>\w\d)=(?P<got>[0-9a-f]{2});|(?P<change>up|dn) (?P<counter>[a-d]);"
    rb"|at (?P<at>[a-d])=(?P<count>\d);|put (?P<put>[0-9a-f]{2});|pop (?P<pop>[0-9a-f]{2});|mul (?P<mul>[rs]);|prd=(?P<prd>\d);)$"
)


@pytest.fixture(scope="module")
def streams() -> tasks.RecallStreams:
    return tasks.recall_streams(3, 20_000, seed=5, max_age=4096)


def interpret(tokens: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Reads a stream and returns (position, length, age, kind) of every question, checking that its answer is right."""
    data = bytes(np.where(tokens < 256, tokens, 0).astype(np.uint8))
    registers, writes, counters, queue = {}, {}, dict.fromkeys("abcd", (0, 0)), []
    product, changed, found, position = (0, 1, 2), 0, [], 0
    order = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    for line in data.split(b"\n"):
        match = COMMAND.match(line[1:] if position == 0 else line)
        start, position = position, position + len(line) + 1
        if not match or position > len(data):
            continue
        command = {name: value.decode() for name, value in match.groupdict().items() if value is not None}
        if key := command.get("set"):
            assert registers.get(key, ("", 0))[0] != command["value"]
            registers[key] = (command["value"], start + 7)
            writes[key] = writes.get(key, 0) + 1
        elif key := command.get("get"):
            value, written = registers[key]
            assert command["got"] == value
            kind = tasks.KINDS.index("register" if writes[key] == 1 else "overwritten")
            found.append((start + 7, 2, start - written + 7, kind))
        elif name := command.get("counter"):
            counters[name] = (counters[name][0] + (1 if command["change"] == "up" else -1), start)
            assert 0 <= counters[name][0] <= 7
        elif name := command.get("at"):
            assert int(command["count"]) == counters[name][0]
            found.append((start + 5, 1, start + 5 - counters[name][1], tasks.KINDS.index("counter")))
        elif value := command.get("put"):
            queue.append((value, start + 4))
        elif value := command.get("pop"):
            expected, written = queue.pop(0)
            assert value == expected
            found.append((start + 4, 2, start + 4 - written, tasks.KINDS.index("queue")))
        elif generator := command.get("mul"):
            a, b, c = product
            product, changed = ((b, c, a) if generator == "r" else (b, a, c)), start
        else:
            assert int(command["prd"]) == order.index(product)
            found.append((start + 4, 1, start + 4 - changed, tasks.KINDS.index("permutation")))
    return found


def test_answers_are_what_an_interpreter_finds(streams):
    answers = streams.answers
    for index in range(3):
        of_stream = answers.stream == index
        expected = interpret(streams.tokens[index])
        fields = (answers.position, answers.length, answers.age, answers.kind)
        assert [tuple(int(field[i]) for field in fields) for i in np.flatnonzero(of_stream)] == expected
    assert set(answers.kind) == set(range(len(tasks.KINDS)))


def test_only_answers_are_scored(streams):
    scored = np.zeros(streams.tokens.shape, int)
    for i in range(len(streams.answers)):
        position, length = streams.answers.position[i], streams.answers.length[i]
        scored[streams.answers.stream[i], position : position + length] = streams.answers.age[i]
    np.testing.assert_array_equal(streams.age, scored)
    np.testing.assert_array_equal(streams.score, scored > 0)


def test_streams_depend_on_the_seed_alone(streams):
    again = tasks.recall_streams(3, 20_000, seed=5, max_age=4096)
    np.testing.assert_array_equal(streams.tokens, again.tokens)
    assert (tasks.recall_streams(3, 20_000, seed=6, max_age=4096).tokens != streams.tokens).any()
    assert (streams.tokens[:, 0] == corpus.BOS).all() and streams.tokens.dtype == np.int32


def test_ages_spread_over_the_octaves(streams):
    rows = tasks.accuracy_by_age(
        streams.answers, np.ones(len(streams.answers), bool), kinds=("register", "overwritten")
    )
    for kind in ("register", "overwritten"):
        counts = {row["min_age"]: row["count"] for row in rows if row["kind"] == kind}
        assert all(counts[octave] >= 5 for octave in (128, 256, 512, 1024, 2048)), counts
    share = sum(len(m) for m in re.findall(rb"(?m)^(?:[sg]et \w\d=[0-9a-f]{2};|(?:up|dn|at|put|pop|mul|prd)[ =]\S+;)\n",
                                           bytes(np.minimum(streams.tokens[0], 255).astype(np.uint8)))) / 20_000  # fmt: skip
    assert 0.3 < share < 0.45


def test_grade_wants_every_token_of_an_answer(streams):
    assert tasks.grade(streams, streams.tokens).all()
    wrong = streams.tokens.copy()
    wrong[streams.answers.stream[0], streams.answers.position[0] + streams.answers.length[0] - 1] += 1
    correct = tasks.grade(streams, wrong)
    assert not correct[0] and correct[1:].all()
    rows = tasks.accuracy_by_age(streams.answers, correct)
    assert sum(row["count"] for row in rows) == len(streams.answers)
    assert sum(row["correct"] for row in rows) == len(streams.answers) - 1


def test_a_mix_of_one_kind():
    only = tasks.recall_streams(1, 4000, seed=1, mix={"register": 1.0}, max_age=1024)
    assert set(only.answers.kind) == {tasks.KINDS.index("register")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mix": {"stack": 1.0}}, "mix"),
        ({"mix": {"register": 0.0}}, "mix"),
        ({"synthetic_share": 0.9}, "synthetic_share"),
        ({"min_age": 64, "max_age": 32}, "Ages"),
        ({"num_tokens": 10}, "num_tokens"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        tasks.recall_streams(**{"num_streams": 1, "num_tokens": 1000, **options})
