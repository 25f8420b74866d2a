"""Finding the sequence that makes workers fail, on workers that do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from math import ceil, log2
from random import Random

from scheduler_svc.suspects import MIN_LOSSES, Suspects


@dataclass
class Trial:
    """Computes all names a token at a time, with two steps in flight, or one during a trial."""

    length: int  # tokens per name
    fails: Callable[[Collection[tuple[int, int]]], bool]  # of (name, position) in a step

    def run(self, names: list[int], *, max_losses: int = 10_000) -> tuple[list[int], int]:
        """Returns the convicted, and how often workers were lost."""
        suspects: Suspects[int] = Suspects()
        done = dict.fromkeys(names, 0)
        convicted: list[int] = []
        losses = 0
        while done and losses < max_losses:
            group = suspects.on_trial or list(done)
            assert set(group) <= done.keys()
            steps = [[(name, done[name]) for name in group]]
            if not suspects.on_trial:
                steps.append([(n, at + 1) for n, at in steps[0] if at + 1 < self.length])
            for i, step in enumerate(steps):
                if self.fails(step):
                    losses += 1
                    in_flight = {n: at + 1 for ahead in steps[i:] for n, at in ahead}
                    if (culprit := suspects.lost(in_flight)) is not None:
                        convicted.append(culprit)
                        del done[culprit]
                    break
                for name, at in step:
                    done[name] = at + 1
                    suspects.passed(name, at + 1)
            for name in [name for name, at in done.items() if at == self.length]:
                del done[name]
                suspects.forget(name)
        assert losses == max_losses or not suspects
        return convicted, losses


def test_any_number_of_culprits_among_innocents(seed: int) -> None:
    rng = Random(seed)
    for _ in range(200):
        num = rng.randint(1, 40)
        poison = {n: rng.randrange(12) for n in rng.sample(range(num), rng.randint(0, min(num, 4)))}
        trial = Trial(12, lambda step, poison=poison: any(at == poison.get(n) for n, at in step))
        convicted, losses = trial.run(list(range(num)))
        assert sorted(convicted) == sorted(poison)
        assert losses <= len(poison) * (3 + ceil(log2(num)))


def test_losses_for_other_reasons_convict_nobody(seed: int) -> None:
    rng = Random(seed)
    for _ in range(200):
        losses = iter([rng.random() < 0.3 for _ in range(5)])
        left = MIN_LOSSES - 1

        def fails(_: object, losses: Iterator[bool] = losses) -> bool:
            nonlocal left
            left -= (lost := left > 0 and next(losses, False))
            return lost

        assert Trial(12, fails).run(list(range(rng.randint(1, 8))))[0] == []


def test_two_sequences_that_fail_only_together_both_finish() -> None:
    trial = Trial(5, lambda step: {(1, 3), (2, 3)} <= set(step))
    assert trial.run([0, 1, 2, 3]) == ([], 2)


def test_a_loss_with_nothing_in_flight_makes_no_suspect() -> None:
    suspects: Suspects[int] = Suspects()
    for _ in range(5):
        assert suspects.lost({}) is None
    assert not suspects


def test_a_suspect_that_ends_ends_its_trial() -> None:
    suspects: Suspects[int] = Suspects()
    for _ in range(2):
        suspects.lost({1: 5, 2: 5})
    assert suspects.on_trial == [1]
    suspects.forget(1)
    assert suspects.on_trial == [2]
    suspects.passed(2, 4)
    assert suspects.on_trial == [2]
    suspects.passed(2, 5)
    assert not suspects.on_trial
    assert not suspects
