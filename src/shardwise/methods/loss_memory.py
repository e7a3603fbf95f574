"""The memory that methods/loss.py allocates, and when, on paper: a trace cannot say it, since the number of chunks
depends on the batch."""

from __future__ import annotations

from math import ceil

from shardwise.spec.cluster import Kind, joins_products
from shardwise.spec.plan import BYTES, Plan
from shardwise.spec.sheet import Sheet

Step = tuple[str, int, tuple[str, ...]]
"""(name, bytes made, names freed)."""


def forward_tensors(sheet: Sheet, plan: Plan, device: Kind) -> list[Step]:
    """Return the tensors that the forward pass of the loss makes and frees, in order. Two chunks stand for any larger
    number: the first is the largest."""
    vocabulary, hidden = map(int, sheet.output.shape)
    compute, wide, tokens, chunks = _sizes(plan, sheet.per_token)
    want_hidden, want_weight = wants(sheet)
    low_precision = compute < wide
    copied = not plan.sharded and plan.precision.compute != sheet.output.dtype
    steps: list[Step] = []
    if plan.method.pairs:  # tokens are scored first, which takes less than what follows, and leaves a factor for each
        steps.append(("factors", tokens * wide, ()))
    if copied:
        steps.append(("cast", vocabulary * hidden * compute, ()))
    if want_hidden:
        steps.append(("grad_hidden", tokens * hidden * compute, ()))
    if want_weight and chunks > 1:
        steps.append(("grad_weight", vocabulary * hidden * wide, ()))
    chunk = plan.batch.loss_chunk_tokens
    in_place = plan.layout.tp > 1 and not sheet.capped  # of its own rows a rank makes no logarithms
    probabilities = "log_probabilities" if not in_place else "widened" if low_precision else "logits"
    for index in range(min(chunks, 2)):
        logits = min(chunk, tokens - index * chunk) * vocabulary
        steps.append(("logits", logits * compute, ()))
        if low_precision:
            steps.append(("widened", logits * wide, ()))
        # Capped in place in the wide type, which is needed until their gradient is made.
        early = ("logits",) if sheet.capped and low_precision else ()
        if in_place:
            steps.append(("", 0, ("logits",) * low_precision))
        else:
            steps.append((probabilities, logits * wide, early))
            read = ("widened", "logits") if low_precision else ("logits",)
            steps.append(("", 0, tuple(name for name in read if name not in early)))
        if plan.entropy:
            steps.append(("entropies", logits * wide, ()))
            steps.append(("", 0, ("entropies",)))
        if low_precision:
            steps.append(("grad_logits", logits * compute, ()))
        product_apart = want_weight and chunks > 1 and low_precision and not joins_products(device)
        if want_weight and chunks == 1:
            steps.append(("grad_weight", vocabulary * hidden * compute, ()))
        elif product_apart:
            steps.append(("product", vocabulary * hidden * compute, ()))
        steps.append(("", 0, (*["product"] * product_apart, *["grad_logits"] * low_precision, probabilities)))
    reported = 8 * (len(plan.loss_figures) + 2 * (sheet.per_token - 1))
    steps.append(("loss", wide + reported, (*["cast"] * copied, *["factors"] * plan.method.pairs)))
    return steps


def loss_bytes(sheet: Sheet, plan: Plan, device: Kind) -> int:
    """The most that the forward pass of the loss holds at a time."""
    held = dict[str, int]()
    alive = 0
    most = 0
    for name, size, freed in forward_tensors(sheet, plan, device):
        alive -= sum(held.pop(one, 0) for one in freed)
        alive += size
        held[name] = held.get(name, 0) + size
        most = max(most, alive)
    return most


def backward_tensors(sheet: Sheet, plan: Plan) -> list[Step]:
    """Return the tensors that the loss's backward makes and frees: gradients are scaled in place, then the weight's
    gets the weight's type."""
    vocabulary, hidden = map(int, sheet.output.shape)
    *_, chunks = _sizes(plan, sheet.per_token)
    compute = plan.precision.compute
    made = compute if chunks == 1 else "fp64" if compute == "fp64" else "fp32"
    weight = compute if plan.sharded else plan.precision.weights
    if not wants(sheet)[1] or made == weight:
        return [("", 0, ("loss",))]
    return [("typed", vocabulary * hidden * BYTES[weight], ("grad_weight", "loss"))]


def products(sheet: Sheet, plan: Plan) -> int:
    """Return how many products the loss makes, each of as many multiplications as the output layer's forward pass."""
    return 1 + sum(wants(sheet)) + plan.method.pairs


def gathers(plan: Plan, per_token: int = 1) -> list[int]:
    """Bytes of each all-gather over tp that the loss of a micro-batch makes in its forward pass, in order: three
    numbers a token of every rank, and one more for entropies, a chunk at a time, and before that of all tokens, to
    score pairs. Its backward sends nothing: what hidden needs is summed at the output layer's edge."""
    _, wide, tokens, chunks = _sizes(plan, per_token)
    chunk, ranks = plan.batch.loss_chunk_tokens, plan.layout.tp
    counts = [min(chunk, tokens - index * chunk) for index in range(chunks)]
    scored, numbers = [tokens] * plan.method.pairs, 3 + plan.entropy
    return [numbers * wide * ranks * count for count in scored + counts] if ranks > 1 else []


def wants(sheet: Sheet) -> tuple[bool, bool]:
    """Return whether a gradient of the hidden states is wanted, and one of the output weight."""
    return bool(sheet.head.backward), sheet.output.trained


def _sizes(plan: Plan, per_token: int) -> tuple[int, int, int, int]:
    """Bytes of an element in the compute dtype and in statistics, hidden states of a micro-batch, chunks."""
    compute = BYTES[plan.precision.compute]
    tokens = plan.batch.micro_batch_size * plan.row_tokens * per_token
    return compute, max(compute, 4), tokens, ceil(tokens / plan.batch.loss_chunk_tokens)


def sums(plan: Plan) -> list[int]:
    """Bytes of each all-reduce that the loss of a micro-batch needs where ranks have some tokens each of the same rows:
    fp64 numbers of each pair, of which a row is taken to have one."""
    size = 8 * plan.method.row_sums * plan.batch.micro_batch_size
    return [size] if size and plan.layout.cp > 1 else []
