"""The trial of the kernels on this device: whether they are right, and where they are not slower.

They are compared with what MLX computes from the same pages: rows of uneven length, and NaN
wherever a kernel must not read. A failure is no error: then MLX's own operations are used."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import median

import mlx.core as mx
import msgspec

from engine.batch.graph import Reach
from engine.batch.metal.calls import (
    MAX_QUERIES,
    PageKernels,
    Spans,
    Variant,
    can_round,
    padded_ints,
    page_table,
    variants_of,
)
from engine.batch.ragged import Row
from engine.cache.page_format import PageFormat

logger = logging.getLogger(__name__)

CHECKED_TOKENS = (1, 63, 64, 65, 150, 1_000)
CHECKED_WINDOW = 70
SCALE = 0.3
STEPS = 4
"""Results may differ by this many steps of their type at the largest."""
TIMED_TOKENS, TIMED_ROWS, TIMED_QUERIES = (256, 2_048, 16_384), (1, 8), (1, 4, MAX_QUERIES)
TRIES = 5
PIECE_BYTES = 64 << 20
"""Short calls are timed several at a time, until they gather so much."""
MAX_BYTES = 1 << 30
"""Calls that gather more are not timed."""

_NAN = 0xFFFFFFFF


class AttentionShape(msgspec.Struct, frozen=True, array_like=True):
    """A measured case."""

    tokens: int  # of each row
    rows: int
    queries: int


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """How long attention takes in a case."""

    point: AttentionShape
    gathering_s: float
    kernel_s: float
    variant: Variant | None  # the fastest one, None if there is none


class KernelChoice(msgspec.Struct, frozen=True):
    """The way of attention for the layers of one kind."""

    rounds: bool = False
    gathers: bool = False
    timings: tuple[Timing, ...] = ()
    reason: str = ""
    """Why there is no kernel at all."""

    @property
    def attends(self) -> bool:
        """Whether a kernel attends in some case."""
        return any(map(_is_kept, self.timings))

    def variant(self, tokens: int, rows: int, queries: int) -> Variant | None:
        """Return the variant for rows of so many ``tokens``; None: gathering is faster, or the
        kernels take fewer queries."""
        nearest = None if queries > MAX_QUERIES else self.nearest(tokens, rows, queries)
        return nearest.variant if nearest is not None and _is_kept(nearest) else None

    def nearest(self, tokens: int, rows: int, queries: int) -> Timing | None:
        """Return the measured case that is most like this one."""

        def distance(timing: Timing) -> float:
            point, found = timing.point, 0.0
            for own, asked in (
                (point.queries, queries),
                (point.rows, rows),
                (point.tokens, tokens),
            ):
                found = 1e3 * found + max(own / asked, asked / own)
            return found

        return min(self.timings, key=distance, default=None)


def _is_kept(timing: Timing) -> bool:
    return timing.variant is not None and timing.kernel_s <= timing.gathering_s


class KernelTrial:
    """The trial of layers with pages of one form, which kernels can read (`can_attend`), and with
    so many heads of queries."""

    def __init__(self, form: PageFormat, query_heads: int) -> None:
        self.form, self.query_heads = form, query_heads
        self.kernels = PageKernels(form)

    def run(self) -> KernelChoice:
        """Try everything. Takes seconds, most of them in the compiler."""
        rounds, gathers = self.rounds_right(), self.gathers_right()
        right = {
            queries: [
                variant
                for variant in variants_of(self.form, self.query_heads, queries)
                if self.attends_right(variant, [queries])
            ]
            for queries in TIMED_QUERIES
        }
        timings = tuple(self._timings(right, gathers)) if any(right.values()) else ()
        return KernelChoice(rounds, gathers, timings)

    def checked(self, way: KernelChoice) -> KernelChoice:
        """Return ``way`` without what is not right now. Compiles everything that it uses."""
        kept = []
        for timing in way.timings:
            queries, widths = timing.point.queries, [1]
            if queries > 1:
                widths = [n for n in (2, 4, 8, 16) if queries // 4 < n <= queries]
            variant = timing.variant if _is_kept(timing) else None
            if variant is not None and not self.attends_right(variant, widths):
                timing = msgspec.structs.replace(timing, variant=None)
            kept.append(timing)
        return KernelChoice(
            way.rounds and self.rounds_right(),
            way.gathers and self.gathers_right(),
            tuple(kept),
            way.reason,
        )

    # -- right -------------------------------------------------------------------------

    def rounds_right(self) -> bool:
        """Return whether new keys and values are rounded to the same bits."""
        if not can_round(self.form):
            return False
        new = [
            each * 10.0 ** mx.random.randint(-5, 6, each.shape[:-1])[..., None]
            for each in _new(self.form, 9)
        ]
        keys, values = (each.astype(self.form.keys.dtype) for each in new)
        return _no_error(
            "rounding",
            lambda: mx.array_equal(
                self.kernels.round(keys, values), self.form.words_of(keys, values)
            ).item(),
        )

    def gathers_right(self) -> bool:
        """Return whether the same values are gathered."""
        pool, tables = _filled(self.form, CHECKED_TOKENS)
        rows = [Row(0, 0, tokens) for tokens in CHECKED_TOKENS]
        reach = Reach(rows, tables, self.form.page_tokens, max(CHECKED_TOKENS))
        wanted = self.form.gather(pool, reach.where(self.form.heads), reach.exists)

        def same() -> bool:
            found = self.gather(pool, reach, 3)
            return all(
                mx.array_equal(each, whole[:, :, 3 : reach.end]).item()
                for each, whole in zip(found, wanted, strict=True)
            )

        return _no_error("gathering", same)

    def attends_right(self, variant: Variant, widths: Sequence[int]) -> bool:
        """Return whether the attention of rows with such numbers of queries is MLX's."""
        return _no_error(
            "attention", lambda: all(self._attends_right(variant, width) for width in widths)
        )

    def _attends_right(self, variant: Variant, width: int) -> bool:
        form = self.form
        pool, tables = _filled(form, CHECKED_TOKENS)
        # Some rows have fewer queries.
        rows = [
            Row(0, max(0, tokens - max(1, width - number % 2)), tokens)
            for number, tokens in enumerate(CHECKED_TOKENS)
        ]
        query = mx.random.normal((len(rows), self.query_heads, width, form.keys.dim))
        query = query.astype(form.keys.dtype)
        sinks = mx.random.normal((self.query_heads,)).astype(form.keys.dtype)
        for window, its_sinks in ((None, None), (CHECKED_WINDOW, None), (None, sinks)):
            unread = tables
            if window is not None:  # pages before the window may belong to others
                firsts = [max(0, row.start + 1 - window) // form.page_tokens for row in rows]
                unread = [
                    [*[0] * first, *table[first:]]
                    for first, table in zip(firsts, tables, strict=True)
                ]
            spans = Spans.of([(row.start, row.end) for row in rows], unread)
            found = self.kernels.attend(pool, query, spans, SCALE, window, its_sinks, variant)
            reach = Reach(rows, tables, form.page_tokens, width, window)
            wanted = _attended(form, pool, reach, query, its_sinks)
            widths = [row.width for row in rows]
            real = mx.arange(width)[:, None] < mx.array(widths)[:, None, None, None]
            limit = STEPS * _step(query.dtype) * mx.abs(mx.where(real, wanted, 0)).max()
            if not mx.all(~real | (mx.abs(found - wanted) <= limit)).item():  # NaN is not
                return False
        return True

    # -- fast --------------------------------------------------------------------------

    def _timings(self, right: dict[int, list[Variant]], gathers: bool) -> Iterator[Timing]:
        form = self.form
        pages = -(-max(TIMED_TOKENS) // form.page_tokens)
        pool = mx.zeros((pages * form.page_words,), mx.uint32)
        mx.eval(pool)
        for tokens, rows, queries in product(TIMED_TOKENS, TIMED_ROWS, TIMED_QUERIES):
            if self.gathered_bytes(tokens, rows) > MAX_BYTES or not right[queries]:
                continue
            case = TimedAttention(self, pool, AttentionShape(tokens, rows, queries))
            found = {variant: case.kernel_s(variant) for variant in right[queries]}
            best = min(found, key=found.__getitem__)
            yield Timing(case.point, case.gathering_s(gathers), found[best], best)

    def gathered_bytes(self, tokens: int, rows: int) -> int:
        """Return the bytes of the values of rows with so many ``tokens``."""
        return tokens * rows * (self.form.keys.value_bytes + self.form.values.value_bytes)

    def gather(self, pool: mx.array, reach: Reach, first: int = 0) -> tuple[mx.array, mx.array]:
        table, ends = page_table(reach.pages), padded_ints(reach.ends)
        return self.kernels.gather(pool, table, ends, first, reach.end - first)


class TimedAttention:
    """Attention that is timed: rows of equal length, each with pages of its own as far as there are
    some."""

    def __init__(self, trial: KernelTrial, pool: mx.array, point: AttentionShape) -> None:
        self.point, self._trial, self._pool = point, trial, pool
        form, (tokens, rows, queries) = trial.form, (point.tokens, point.rows, point.queries)
        pages, count = pool.size // form.page_words, -(-tokens // form.page_tokens)
        tables = [[(row * count + i) % pages for i in range(count)] for row in range(rows)]
        batch = [Row(row, tokens - queries, tokens) for row in range(rows)]
        self._reach = Reach(batch, tables, form.page_tokens, queries)
        self._spans = Spans.of([(row.start, row.end) for row in batch], tables)
        self._where = self._reach.where(form.heads)
        shape = rows, trial.query_heads, queries, form.keys.dim
        self._query = mx.zeros(shape, form.keys.dtype)
        self._calls = max(1, min(8, PIECE_BYTES // trial.gathered_bytes(tokens, rows)))
        mx.eval(self._query, self._where)

    def kernel_s(self, variant: Variant) -> float:
        return self._seconds(
            lambda: self._trial.kernels.attend(
                self._pool, self._query, self._spans, SCALE, None, None, variant
            )
        )

    def gathering_s(self, by_kernel: bool) -> float:
        def run() -> mx.array:
            if by_kernel:
                keys, values = self._trial.gather(self._pool, self._reach)
            else:
                keys, values = self._trial.form.gather(self._pool, self._where)
                keys, values = self._reach.cut(keys), self._reach.cut(values)
            return self._attended(keys, values)

        return self._seconds(run)

    def values_s(self) -> float:
        """Return the time over contiguous arrays of values."""
        keys, values = self._trial.form.gather(self._pool, self._where)
        keys, values = (mx.contiguous(self._reach.cut(each)) for each in (keys, values))
        mx.eval(keys, values)
        return self._seconds(lambda: self._attended(keys, values))

    def _attended(self, keys: mx.array, values: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(
            self._query, keys, values, scale=SCALE, mask=self._reach.mask
        )

    def _seconds(self, call: Callable[[], mx.array]) -> float:
        found = []
        for _ in range(TRIES + 1):  # the first may compile
            begun = time.perf_counter()
            mx.eval([call() for _ in range(self._calls)])
            found.append((time.perf_counter() - begun) / self._calls)
        return median(found[1:])


def _new(form: PageFormat, tokens: int) -> tuple[mx.array, mx.array]:
    """Return random keys and values (1, kv_heads, tokens, dim)."""
    keys, values = (
        mx.random.normal((1, form.heads, tokens, kind.dim)).astype(kind.dtype)
        for kind in (form.keys, form.values)
    )
    return keys, values


def _filled(form: PageFormat, lengths: Sequence[int]) -> tuple[mx.array, list[list[int]]]:
    """Return an array of pages with rows of such ``lengths``, and their tables. The rest, with page
    0, is NaN."""
    size = form.page_tokens
    counts = [-(-length // size) for length in lengths]
    numbers = iter(mx.random.permutation(sum(counts)).tolist())
    tables = [[1 + next(numbers) for _ in range(count)] for count in counts]
    pool = mx.full(((1 + sum(counts)) * form.page_words,), _NAN, mx.uint32)
    for length, table in zip(lengths, tables, strict=True):
        at = [(table[position // size], position % size) for position in range(length)]
        pages, places = (
            mx.array(each, mx.uint32).reshape(1, 1, -1, 1) for each in zip(*at, strict=True)
        )
        pool[form.index(pages, places)] = form.words_of(*_new(form, length))
    mx.eval(pool)
    return pool, tables


def _attended(
    form: PageFormat, pool: mx.array, reach: Reach, query: mx.array, sinks: mx.array | None
) -> mx.array:
    """Return attention as MLX computes it."""
    keys, values = form.gather(pool, reach.where(form.heads), reach.exists)
    return mx.fast.scaled_dot_product_attention(
        query, reach.cut(keys), reach.cut(values), scale=SCALE, mask=reach.mask, sinks=sinks
    )


def _step(dtype: mx.Dtype) -> float:
    """Return the distance of neighbouring numbers of a type, relative to them. Sums in fp32 are
    rounded many times."""
    return float(mx.finfo(dtype).eps) * (64 if dtype == mx.float32 else 1)


def _no_error(what: str, check: Callable[[], object]) -> bool:
    """Return whether ``check`` passes. Whatever the compiler or the device raises counts as
    wrong."""
    try:
        passed = bool(check())
    except Exception as error:  # MLX raises many types
        logger.warning("the kernel for %s cannot run: %s", what, error)
        return False
    if not passed:
        logger.warning("the kernel for %s is wrong on this device", what)
    return passed
