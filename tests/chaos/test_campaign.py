"""Whether a campaign would notice damage. `make soak` runs campaigns."""

from __future__ import annotations

import pytest

from nano_vllm_grpc.types import Chunk
from tests.chaos.report import Rest
from tests.faults.transcript import Damage, Transcript


def chunk(*token_ids: int, offset: int = 0, finished: bool = False) -> Chunk:
    return Chunk(
        request_id="",
        index=0,
        text="".join(map(chr, token_ids)),
        token_ids=list(token_ids),
        token_offset=offset,
        logprobs=[{token: -1.0} for token in token_ids],
        finish_reason="length" if finished else None,
    )


def transcript(*chunks: Chunk) -> Transcript:
    made = Transcript()
    for each in chunks:
        made.add(each)
    return made


RIGHT = transcript(chunk(65, 66, 67), chunk(68, offset=3, finished=True))


def counts(damage: Damage) -> tuple[int, int, int]:
    return damage.lost, damage.duplicated, damage.wrong


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([chunk(65), chunk(66, 67, 68, offset=1, finished=True)], (0, 0, 0)),
        ([chunk(65, 66, 67, finished=True)], (1, 0, 0)),
        ([chunk(65, 66), chunk(68, offset=3, finished=True)], (2, 0, 1)),
        ([chunk(65, 66), chunk(66, 67, 68, offset=1, finished=True)], (0, 2, 2)),
        ([chunk(65, 66, 99, 68, finished=True)], (0, 0, 1)),
        ([], (4, 0, 0)),
    ],
    ids=["other chunks", "cut short", "a gap", "a repetition", "another token", "nothing"],
)
def test_damage_is_found(found: list[Chunk], expected: tuple[int, int, int]) -> None:
    damage = transcript(*found).compare(RIGHT)
    assert counts(damage) == expected
    assert bool(damage.differences) == any(expected)


def test_more_than_tokens_is_compared() -> None:
    other = transcript(chunk(65, 66, 67), chunk(68, offset=3))  # it has not ended
    assert other.compare(RIGHT).differences
    other = transcript(chunk(65, 66, 67), chunk(68, offset=3, finished=True))
    other.parts[0].logprobs[2] = {67: -1.1}
    assert counts(other.compare(RIGHT)) == (0, 0, 0)
    assert other.compare(RIGHT).differences


def test_what_was_cancelled_has_to_be_a_beginning() -> None:
    assert not transcript(chunk(65, 66)).compare(RIGHT, cut=True).differences
    assert not transcript().compare(RIGHT, cut=True).differences
    assert transcript(chunk(65, 67)).compare(RIGHT, cut=True).wrong == 1
    assert transcript(chunk(65), chunk(67, offset=2)).compare(RIGHT, cut=True).lost == 1


def test_what_is_left_behind_is_found() -> None:
    start = Rest(0, 0, 0, 5, {"frontend-0": 100.0})
    assert not Rest(0, 0, 0, 5, {"frontend-0": 240.0}).problems_since(start)
    assert len(Rest(3, 0, 0, 6, {"frontend-0": 260.0}).problems_since(start)) == 3
