"""The durations of a unit's operations: the kernels that they become, one by one or fused.

Between products, attention and collectives stand pointwise operations and sums. Unfused, each is a kernel that reads
and writes all of its own; fused, a run of them reads what was there before it once, and writes what is read after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from shardwise.models.delta_sizes import CHUNK
from shardwise.planner.seconds.rates import Rates
from shardwise.spec.plan import BYTES, Plan
from shardwise.spec.records import TOKEN_ACCURACY
from shardwise.spec.sheet import GROUPED, GROUPED_OUTER, KEPT_UNITS, SCALED, SEND, Op, Sheet, Unit, number
from shardwise.techniques.quantised import rows_at_once

SUM = "aten.sum"
"""A sum over tokens, which gives the gradient of a small weight, is a kernel of its own in a fused run."""
EMPTY = ("aten.empty", "aten.new_empty")
LOOK_UP = "aten.embedding"
WAIT = "shardwise.wait_rows"
"""What a collective writes is there only after this, which takes no time of its own."""
NO_KERNEL = (*EMPTY, WAIT)
GROUPED_PRODUCTS = 9
"""Of a layer with experts, forward and backward: each bears its part of what the host does more there."""
DEQUANTISE, DEQUANTISE_KERNELS = "shardwise.dequantise", 4
"""In a round of rows: codes become indices, these are looked up, scaled, and narrowed."""
FROM_FLOAT8, FROM_FLOAT8_KERNELS = "shardwise.from_float8", 6
"""Codes are widened into the result, which is then read, multiplied and written again; of rows it takes the scales."""
CODE_BYTES, CASTS = 1, {"eager": (4, 8), "fused": (2, 2), "compiled": (2, 2)}
"""In float8 each matrix of a product is read for its maxima, read and written as it is scaled, and read once more to
become codes, in so many kernels, most of them of scales; compiled, it is read twice."""
TRANSCENDENTAL = ("silu", "gelu", "sigmoid", "softmax", "tanh", "exp", "cos", "sin")
"""In the names of operations that compute such a function of each element."""
BACKWARD = "_backward"
RULE_BYTES, RULE_KERNELS = ((18_000, 60_000), (35_000, 78_000)), ((15, 45), (28, 60))
"""Bytes of fp32 that the rule of gated delta nets moves for a token and head of 128 values, forward and backward, and
kernels for each chunk; then the same with what is computed more where states pass between pieces: counted in its
program, not measured."""
PASSED_KERNELS = 3
"""Of each piece whose map a state passes through: a product, a sum, and the copy of a state that is wanted."""
JOINED_BYTES, JOINS = {False: 26, True: 10}, 8
"""Of each number that a part of attention over ranks makes: the joined output is read and written twice in fp32, and
what is added to it once; gradients once. Kernels of a part beside attention's own."""


@dataclass(frozen=True)
class Duration:
    """Nanoseconds of one operation: its kernels on the device, of which products and attention are kinds, and the host
    that launches them."""

    device_ns: int = 0
    host_ns: int = 0
    kind: str = "pointwise"


NOTHING = Duration()
_number = lru_cache(maxsize=2**16)(number)
"""Many operations have the same dims."""


@lru_cache(maxsize=32 * KEPT_UNITS)
def durations(unit: Unit, direction: str, rates: Rates, b: int, s: int) -> tuple[Duration, ...]:
    """Return the duration of each operation of a unit's ``forward`` or ``backward``, for ``b`` sequences of ``s``
    tokens. Of a fused run the first operation has the whole."""
    ops = unit.forward if direction == "forward" else unit.backward
    if rates.blocks != "fused" and not (rates.blocks == "compiled" and unit.name == "block"):
        return _unfused(_Ops(ops), unit.window, rates, (b, s))
    runs = [*_runs(ops)]
    found = [NOTHING] * len(ops)
    inside = {i for run in runs for i in run}
    kept = _outlive(unit, direction)
    for i, op in enumerate(ops):
        if i not in inside:
            found[i] = _of(op, unit.window, rates, (b, s))
    for run in runs:
        found[run[0]] = _pointwise([*_fused(run, ops, unit, kept, (b, s))], rates)
    return tuple(found)


class _Ops:
    """The operations of a pass, which units share that differ in what they compute again: known by where they are,
    without a look at each."""

    def __init__(self, each: tuple[Op, ...]) -> None:
        self.each = each

    def __hash__(self) -> int:
        return id(self.each)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Ops) and self.each is other.each


@lru_cache(maxsize=32 * KEPT_UNITS)
def _unfused(ops: _Ops, window: int | None, rates: Rates, sizes: tuple[int, int]) -> tuple[Duration, ...]:
    return tuple(_of(op, window, rates, sizes) for op in ops.each)


def under_way(ops: tuple[Op, ...]) -> dict[int, range]:
    """Return, for each collective that is waited for later, the operations that run meanwhile."""
    waits = {tensor: i for i, op in enumerate(ops) if op.name == WAIT for tensor in op.writes}
    sends = ((i, op.allocates) for i, op in enumerate(ops) if op.kind == SEND)
    return {i: range(i + 1, waits[made[0]]) for i, made in sends if made and made[0] in waits}


def _of(op: Op, window: int | None, rates: Rates, sizes: tuple[int, int]) -> Duration:
    if op.kind == SEND or op.name.startswith(NO_KERNEL):
        return NOTHING
    if op.kind == "attention":
        groups, queries, keys, head_dim = (_number(dim, sizes) for dim in op.dims[:4])
        pairs = groups * queries * (keys if window is None or window >= keys else 2 * window)
        flops = op.flops * sizes[0] * sizes[1] ** 2 * seen(keys, window) / keys**2
        backward = op.name.endswith(BACKWARD)
        seconds, kernels = rates.attention_s(flops, pairs, (queries, head_dim), backward=backward), 3 if backward else 1
        if (ranks := keys // queries) > 1:  # a part for each rank's keys, with half the queries or half the keys
            joined = groups * queries * head_dim * (1 + 3 * (ranks - 1)) // 4
            seconds += rates.pointwise_s(JOINED_BYTES[backward] * joined)
            kernels = ranks * (kernels + JOINS)
        return _timed(seconds, rates, "attention", kernels=kernels)
    if op.kind == "rule":
        return _rule(op, rates, sizes)
    if op.kind == "matmul":
        return _product(op.name, tuple(_number(dim, sizes) for dim in op.dims), rates)
    moved = sum(_number(dim, sizes) for dim in (*op.read, *op.written))
    if op.name == LOOK_UP:
        moved = 2 * sum(_number(dim, sizes) for dim in op.written)  # it reads the rows that it looks up, not the table
    if op.name == DEQUANTISE and rates.dequantised:
        rows, columns = (_number(dim, sizes) for dim in op.dims)
        moved += round(rates.dequantised * rows * columns)
        rounds = -(-rows // rows_at_once(rows, columns))
        return _timed(rates.pointwise_s(moved), rates, "pointwise", kernels=DEQUANTISE_KERNELS * rounds)
    if op.name == FROM_FLOAT8:
        moved += 2 * sum(_number(dim, sizes) for dim in op.written)
        return _timed(rates.pointwise_s(moved), rates, "pointwise", kernels=FROM_FLOAT8_KERNELS)
    extra = rates.product_s(*(_number(dim, sizes) for dim in op.dims)) if len(op.dims) == 4 else 0.0
    made = _kernel(moved, rates, transcendental=op.name.removeprefix("aten.").startswith(TRANSCENDENTAL))
    return Duration(made.device_ns + round(1e9 * extra), made.host_ns) if extra else made


def _rule(op: Op, rates: Rates, sizes: tuple[int, int]) -> Duration:
    """The rule of gated delta nets in kernels of torch: products of chunks, what they pass on to each other in memory,
    and so many launches for each chunk of a row, or of a piece of one; then of each piece of the row the product with
    the state before it."""
    backward, (tokens, key, value, *over) = op.name.endswith(BACKWARD), (_number(dim, sizes) for dim in op.dims)
    ranks, pieces = over or (0, 1)
    moved = sum(_number(dim, sizes) for dim in (*op.read, *op.written)) + RULE_BYTES[ranks > 0][backward] * tokens
    columns = max(1, op.flops * sizes[0] * sizes[1] // (2 * tokens * CHUNK))
    seconds = rates.pointwise_s(moved) + rates.product_s(-(-tokens // CHUNK), CHUNK, columns, CHUNK)
    kernels = RULE_KERNELS[ranks > 0][backward] * -(-sizes[1] // (pieces * CHUNK))
    if ranks:
        seconds += ranks * pieces * rates.product_s(tokens // sizes[1], key, value, key)
        kernels += ranks * pieces * PASSED_KERNELS
    return _timed(seconds, rates, "pointwise", kernels=kernels)


@lru_cache(maxsize=2**14)
def _product(name: str, dims: tuple[int, ...], rates: Rates) -> Duration:
    groups, m, n, k = dims
    waited_ns = round(1e9 * rates.experts_s / GROUPED_PRODUCTS) if rates.cuda else 0
    if name.startswith(SCALED):  # of experts one after another
        passes, kernels = CASTS[rates.blocks]
        each = rates.casts * (passes * BYTES[rates.dtype] + CODE_BYTES)
        seconds = groups * rates.product_s(1, max(1, m // groups), n, k) / rates.scaled
        multiplied = _timed(seconds, rates, "products", kernels=groups)
        cast_s = rates.pointwise_s(m * k * each) + rates.pointwise_s(groups * n * k * each)
        of_cast = _timed(cast_s, rates, "products", kernels=round(2 * kernels * rates.casts))
        host_ns = multiplied.host_ns + of_cast.host_ns + (waited_ns if groups > 1 else 0)
        return Duration(multiplied.device_ns + of_cast.device_ns, host_ns, "products")
    if name not in (GROUPED, GROUPED_OUTER):
        return _timed(rates.product_s(groups, m, n, k), rates, "products")
    outer = name == GROUPED_OUTER
    rows, matrix = (k, (m, n)) if outer else (m, (n, k))
    made = _timed(rates.grouped_s(groups, rows, matrix, outer=outer), rates, "products")
    return replace(made, host_ns=made.host_ns + waited_ns)


def _timed(seconds: float, rates: Rates, kind: str, kernels: int = 1) -> Duration:
    host_ns = round(1e9 * kernels * rates.launch_s)
    if not rates.cuda:  # what launches computes
        own = 0 if rates.measured else host_ns
        return Duration(round(1e9 * seconds) + own, 0, kind)
    return Duration(round(1e9 * (seconds + kernels * rates.gap_s)), host_ns, kind)


def _pointwise(moved: list[int], rates: Rates, times: int = 1, *, transcendental: bool = False) -> Duration:
    """Kernels that move so many bytes each, so many ``times``."""
    seconds = times * sum(rates.pointwise_s(each, transcendental=transcendental) for each in moved)
    return _timed(seconds, rates, "pointwise", kernels=times * len(moved))


@lru_cache(maxsize=2**14)
def _kernel(moved: int, rates: Rates, *, transcendental: bool) -> Duration:
    return _pointwise([moved], rates, transcendental=transcendental)


def _runs(ops: tuple[Op, ...]) -> Iterator[list[int]]:
    """The operations between two that are not fused."""
    alone = [bool(op.kind in ("matmul", "attention", SEND) or op.dims or op.name in (LOOK_UP, WAIT)) for op in ops]
    for apart, run in groupby(range(len(ops)), key=alone.__getitem__):
        fused = [i for i in run if not ops[i].name.startswith(EMPTY)]
        if fused and not apart:
            yield fused


def _outlive(unit: Unit, direction: str) -> Set[int]:
    """Return what is still there when a pass of the unit is over."""
    if direction == "forward":
        return unit.saved | {unit.output}
    return {tensor for _, tensor in unit.weight_gradients} | {unit.gradient_out}


def _fused(run: list[int], ops: tuple[Op, ...], unit: Unit, kept: Set[int], sizes: tuple[int, int]) -> Iterator[int]:
    """Bytes of each kernel that a run becomes: one, and one for each sum over tokens, which reads the run's inputs
    again."""
    inside = [ops[i] for i in run]
    made = {tensor for op in inside for tensor in op.allocates}
    touched = {tensor for op in inside for tensor in (*op.reads, *op.writes)}
    later = {tensor for op in ops[run[-1] + 1 :] for tensor in (*op.reads, *op.writes)} | kept
    read = sum(unit.tensors[tensor].bytes(*sizes) for tensor in touched - made)
    read += sum(_number(dim, sizes) for op in inside if op.weight and not op.reads for dim in op.read)  # a cast of it
    sums = [op for op in inside if op.name.startswith(SUM) and op.allocates and _small(op, unit)]
    summed = {tensor for op in sums for tensor in op.allocates}
    wrote = {tensor for op in inside for tensor in (*op.allocates, *op.writes)} & later - summed
    if len(sums) < len(inside):
        yield read + sum(unit.tensors[tensor].bytes(*sizes) for tensor in wrote)
    for _ in sums:
        yield read


def _small(op: Op, unit: Unit) -> bool:
    """Say whether what an operation makes grows with neither tokens nor rows."""
    made = (unit.tensors[tensor] for tensor in op.allocates)
    return not any(dim in ("b", "s", "b*s") for tensor in made for dim in tensor.symbols or tensor.shape)


def seen(s: int, window: int | None) -> int:
    """Twice the pairs of query and key in a causal sequence of ``s``, roughly: s * s, or less with a window."""
    return s * s if window is None or window >= s else window * (2 * s - window)


def loss_durations(sheet: Sheet, plan: Plan, rates: Rates, products: int) -> tuple[Duration, Duration]:
    """The loss of a micro-batch, which is in no unit: ``products`` by the output layer for all tokens, and the passes
    over logits in between; of the gradients it adds, an fp32 one is read and written a chunk. Compiled, which it is
    where a rank holds all rows, it reads logits twice, for the sum and for their gradient, and writes that; what is
    told of tokens is found in the same passes."""
    vocabulary, hidden = (int(dim) for dim in sheet.output.shape)
    tokens = plan.batch.micro_batch_size * plan.row_tokens * sheet.per_token
    chunk = min(plan.batch.loss_chunk_tokens, tokens)
    chunks = -(-tokens // chunk)
    narrow, wide = BYTES[plan.precision.compute], max(4, BYTES[plan.precision.compute])
    # Logits are made, widened, their maximum and sum are read, and their gradient is made and narrowed.
    passes = narrow + wide, 2 * wide, 2 * wide, wide + narrow
    moved = [round(rates.logits * chunk * vocabulary * size) for size in passes]
    if TOKEN_ACCURACY in plan.loss_figures:  # the greatest logit is looked for
        moved[0] += round(rates.logits * chunk * vocabulary * (narrow if plan.layout.tp == 1 else wide))
    if plan.entropy:  # exponentials are made, multiplied by their logarithms and summed
        moved[1] += round(rates.logits * chunk * vocabulary * 6 * wide)
    if chunks > 1 and products > 2:
        moved.append(2 * 4 * vocabulary * hidden)
    each = rates.product_s(1, chunk, vocabulary, hidden)
    multiplied = _timed(chunks * products * each, rates, "products", kernels=chunks * products)
    plain, exponentials = moved[:1] + moved[3:], moved[1:3]  # of the sum, and of the gradient
    if rates.fused_loss and plan.layout.tp == 1:
        plain, exponentials = moved[4:], [chunk * vocabulary * size for size in (narrow, 2 * narrow)]
    made = _pointwise(plain, rates, chunks), _pointwise(exponentials, rates, chunks, transcendental=True)
    return multiplied, Duration(sum(one.device_ns for one in made), sum(one.host_ns for one in made))
