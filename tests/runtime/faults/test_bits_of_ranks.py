"""Who is odd, by checksums of ranks; and that a checksum sees every flipped bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import nn

from shardwise.runtime.check_bits import EVERY, in_words, only_warns, standing, steps_between, twins
from shardwise.runtime.checksums import Made, checksum, watching_passes
from shardwise.runtime.faults.bits import Odd, Place, RankBits, differing, odd_held, odd_made
from shardwise.spec.layout import Layout

FIRST: Place = (0, 3, "the output of layers.3")
THEN: Place = (1, -3, "gradient of layers.3")


def made(*sums: tuple[int, int], role: str = "") -> list[RankBits]:
    """Ranks that made these two things."""
    return [RankBits(f"h{rank}", "cpu", role, {}, {THEN: then, FIRST: one}) for rank, (one, then) in enumerate(sums)]


def test_every_single_flipped_bit_changes_a_checksum() -> None:
    for dtype, view in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.uint8, torch.uint8)):
        tensor = torch.randn(3, 7).to(dtype)
        whole = checksum(tensor)
        bits = tensor.view(view)
        for place in range(tensor.numel()):
            for bit in range(8 * tensor.element_size()):
                flip = -(2**bit) if bit == 8 * view.itemsize - 1 and view.is_signed else 2**bit
                bits.view(-1)[place] ^= flip
                assert checksum(tensor) != whole
                bits.view(-1)[place] ^= flip
        assert checksum(tensor) == whole


def test_a_checksum_is_that_of_the_values_wherever_they_lie() -> None:
    tensor = torch.randn(40)
    assert checksum(tensor[1:9]) == checksum(tensor[1:9].clone())
    assert checksum(tensor.view(5, 8).t()) == checksum(tensor.view(5, 8).t().contiguous())
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor(2.0)) and checksum(torch.empty(0)) == 0


def test_the_majority_is_right_and_of_two_ranks_none_is() -> None:
    three = [RankBits(holds={"a": 1, "b": number}) for number in (2, 2, 5)]
    assert odd_held(three) == Odd("b", (2,), (0, 1), certain=True)
    assert odd_held(three[1:]) == Odd("b", (1,), (0,), certain=False)
    assert odd_held([RankBits(holds={"a": 1}), RankBits(holds={"b": 2})]) is None


def test_who_makes_something_else_a_second_time_has_erred_once() -> None:
    for ranks, times in product((2, 3), (1, 3)):
        first = made((1, 1), (1, 9), *[(1, 1)] * (ranks - 2))
        odd, varying = odd_made([first, *[made(*[(1, 1)] * ranks)] * times])
        assert odd == Odd(THEN[2], (1,), tuple({*range(ranks)} - {1}), certain=True, again=False) and not varying


def test_who_makes_the_same_wrong_bits_again_is_told_by_three_and_by_the_first_that_differs() -> None:
    first = made((1, 1), (8, 9), (1, 1))
    assert odd_made([first] * 4) == (Odd(FIRST[2], (1,), (0, 2), certain=True, again=True), set())
    assert odd_made([first[:2]] * 4) == (Odd(FIRST[2], (1,), (0,), certain=False, again=True), set())


def test_what_most_ranks_make_anew_each_time_is_left_out() -> None:
    first, second = made((1, 1), (1, 2), (1, 3)), made((1, 4), (1, 5), (1, 6))
    assert odd_made([first, second]) == (None, {THEN[2]})
    assert differing(first, {THEN[2]}) == [] and len(differing(first)) == 1
    assert odd_made([made((1, 1), (2, 2)), made((1, 3), (2, 4))])[0] == Odd(FIRST[2], (1,), (0,), False, True)


def test_what_varies_only_sometimes_accuses_nobody() -> None:
    """Two ranks of eight vary, in different rounds; or one does, where the others do not agree or are wrong at
    first, or behind what varies; or ranks of different replicas do."""
    quiet = [(1, 1)] * 8
    rounds = [made((1, 9), *quiet[1:]), made(*quiet), made(*quiet[:7], (1, 5)), made(*quiet)]
    assert odd_made(rounds[:2])[0] is not None and odd_made(rounds) == (None, {THEN[2]})
    assert odd_made([made((1, 1), (1, 9), (1, 3)), made((1, 1), (1, 1), (1, 3))]) == (None, {THEN[2]})
    assert odd_made([made((1, 1), (1, 2), (1, 2)), made((1, 1), (1, 2), (1, 1))]) == (None, {THEN[2]})
    assert odd_made([made((2, 9), (1, 1)), made((1, 1), (1, 1))], {FIRST[2]}) == (None, {THEN[2]})
    rounds = [[*made((1, 0), (1, 9), role="tp0"), *made((2, 8), (2, 0), role="tp1")]]
    rounds.append([*made((1, 0), (1, 0), role="tp0"), *made((2, 0), (2, 0), role="tp1")])
    assert odd_made(rounds) == (None, {THEN[2]})


def test_ranks_that_a_wrong_number_was_sent_to_are_told_with_its_maker() -> None:
    rounds = [[*made((1, 0), (1, 9), role="tp0"), *made((2, 0), (2, 8), role="tp1")]]
    rounds.append([*made((1, 0), (1, 0), role="tp0"), *made((2, 0), (2, 0), role="tp1")])
    assert odd_made(rounds) == (Odd(THEN[2], (1, 3), (0, 2), certain=True, again=False), set())


def test_what_gpus_make_is_only_warned_of_unless_it_is_deterministic() -> None:
    assert [only_warns(device, sure) for device in ("cpu", "cuda") for sure in (False, True)] == [0, 0, 1, 0]


def test_ranks_are_compared_with_those_of_their_role_and_told_together() -> None:
    of_roles = [*made((1, 0), (5, 0), role="tp0"), *made((2, 0), (6, 0), role="tp1")]
    odd, _ = odd_made([of_roles] * 4)
    assert odd == Odd(FIRST[2], (1, 3), (0, 2), certain=False, again=True)
    assert differing([*made((1, 0), role="tp0"), *made((2, 0), role="tp1")]) == []
    text = in_words(odd, of_roles)
    assert all(part in text for part in ("ranks 1 and 3 (host h1", "ranks 0 and 2 (host h0", FIRST[2]))


@pytest.mark.parametrize(
    ("layout", "found"),
    [
        (Layout(dp_replicate=4), 4),
        (Layout(dp_shard=4, tp=2), 4),
        (Layout(dp_shard=4, ep=2), 2),
        (Layout(pp=2, cp=2), 1),
    ],
)
def test_how_many_ranks_compute_alike(layout: Layout, found: int) -> None:
    assert twins(layout) == found


def test_only_a_checkpoint_that_this_start_compared_is_said_to_be() -> None:
    compared = {"step-00000100", "step-00000200"}
    old, new = (standing(f"step-00000{number}", compared) for number in ("050", "200"))
    assert ("not compared" in old, "not compared" in new) == (True, False)
    assert old.startswith("step-00000050") and new.startswith("step-00000200")
    assert "step" not in standing(None, compared)


def test_it_is_off_below_64_ranks_unless_asked_for() -> None:
    few, many = Layout(dp_shard=63), Layout(dp_shard=64)
    assert (steps_between("auto", few), steps_between("auto", many)) == (None, EVERY)
    assert (steps_between(7, few), steps_between(None, many), steps_between(7, Layout())) == (7, None, None)


class Two(nn.Module):
    """An embedding, two blocks and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))
        self.head = nn.Linear(4, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def _parts() -> Iterator[nn.Module]:
    torch.manual_seed(0)
    yield Two()


def test_a_pass_is_watched_from_end_to_end_and_only_within() -> None:
    """A weight of each unit that is changed is seen first where it acts; the gradients are those without."""
    [model], ids = [*_parts()], torch.arange(8)

    def once() -> dict[Place, int]:
        found = Made()
        with watching_passes([model], found):
            model(ids).square().sum().backward()
        return found.read()

    first = once()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    model(ids).square().sum().backward()
    assert all(torch.equal(one, other.grad) for one, other in zip(gradients, model.parameters(), strict=True))
    model.zero_grad()
    units = ("embed", "layers.0", "layers.1", "head")
    assert once() == first and len(first) == 3 * len(units)
    for name in units:
        weight = next(model.get_submodule(name).parameters()).data
        weight.view(-1).view(torch.int32)[2] ^= 1 << 20
        changed = min(place for place, one in once().items() if one != first[place])
        assert changed[2] == f"the output of {name}"
        weight.view(-1).view(torch.int32)[2] ^= 1 << 20
    model.layers[1].register_full_backward_pre_hook(lambda module, grads: tuple(2 * each for each in grads))
    assert min(place for place, one in once().items() if one != first[place])[0] == 1
