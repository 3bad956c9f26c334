import itertools
import random

from engine.cache.grouping import Run, split_runs


def cost(result: list[Run], call_cost: int) -> int:
    return sum(call_cost + (run.last - run.first + 1) * run.length for run in result)


def test_the_split_is_the_cheapest_of_all() -> None:
    choose = random.Random(3)
    for _ in range(50):
        rows = sorted(choose.sample(range(10), 5))
        lengths = [choose.randrange(1, 300) for _ in rows]
        every_split = []
        for cuts in itertools.product([False, True], repeat=len(rows) - 1):
            pieces, piece = [], [0]
            for index, cut in enumerate(cuts, 1):
                if cut:
                    pieces.append(piece)
                    piece = []
                piece.append(index)
            pieces.append(piece)
            every_split.append(
                [Run(rows[p[0]], rows[p[-1]], max(lengths[i] for i in p)) for p in pieces]
            )
        best = min(cost(split, 60) for split in every_split)
        assert cost(split_runs(rows, lengths, 60), 60) == best


def test_rows_between_those_that_attend_cost_at_most_a_call() -> None:
    choose = random.Random(5)
    for _ in range(200):
        rows = sorted(choose.sample(range(64), choose.randint(1, 12)))
        runs = split_runs(rows, [length := choose.randint(1, 3000)] * len(rows), 4000)
        wasted = sum(run.last - run.first + 1 for run in runs) - len(rows)
        assert wasted * length <= 4000 * (len(rows) - len(runs))
