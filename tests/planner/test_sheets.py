"""The units that ship are those the code makes; another is traced in a process of its own, and kept."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import date
from importlib.resources import files
from pathlib import Path
from random import Random

import pytest

from shardwise import techniques
from shardwise.cli.app import main
from shardwise.models.config import ModelSpec, from_hf, model_spec, parameter_count, with_fields
from shardwise.models.families import FAMILIES, FULL, SLIDING
from shardwise.models.lookup import load_spec
from shardwise.planner import sheets, ship
from shardwise.planner.apart import _ended, _process, traced_apart
from shardwise.planner.schedule import folded
from shardwise.planner.seconds.kernels import seen
from shardwise.planner.sheets import key_of, name_of, pack_unit, sheet_of, unpack_unit, variant_of
from shardwise.planner.shipped_units import SHIPPED, Shipped, written
from shardwise.planner.trace import trace_once, traced_here
from shardwise.planner.variants import chosen
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Plan, Precision, Shard
from shardwise.spec.rank_kind import RankKind, rank_kind_of
from shardwise.spec.sheet import Sheet, Unit, number, size_of
from shardwise.techniques.variant import Variant
from tests.models.families import config_of
from tests.models.hf_models import spec_of as hf_spec_of
from tests.planner.bound import bound as with_numbers
from tests.recipes.test_recipes import FILES, MEANT_FOR, quickstart_model

SPEC = model_spec("small", 500, 32, 80, 3, 4, 2, 8)
ADAPTED = Plan(Layout(dp_shard=2, tp=2), Batch(2, 1, 64), Shard("zero3"), Precision("bf16"), lora=Lora(4, nf4=True))


MIXTURE = replace(load_spec("Qwen3-30B-A3B"), num_hidden_layers=2)


@pytest.mark.parametrize(
    ("tp", "ep", "s"),
    [(1, 1, 512), (2, 1, 512), (1, 4, 511), (2, 4, 512), pytest.param(2, 4, 511, marks=pytest.mark.prove), (8, 8, 64)],
)
def test_one_sheet_holds_for_micro_batches_of_all_sizes(tp: int, ep: int, s: int) -> None:
    """Of each micro-batch the numbers are those that its own sizes give, bound symbol by symbol, rows of experts and a
    rank's share of the tokens among them. Where rows cannot be split evenly, each size has units of its own."""
    layout, found = Layout(1, 8 // tp, tp=tp, ep=ep), list[Sheet]()
    for m in (1, 3, 4):
        plan = Plan(layout, Batch(m, 1, s), Shard("zero3"), Precision("bf16"), sequence_parallel=tp > 1)
        sheet = sheet_of(MIXTURE, plan)
        assert sheet.inside == techniques.inside(plan)
        rank_kind = rank_kind_of(0, techniques.inside(plan).layout, plan.stages(2))
        kinds: tuple[tuple[int | str, Unit], ...] = (
            ("embedding", sheet.embedding),
            (0, sheet.blocks[0]),
            ("head", sheet.head),
        )
        for which, unit in kinds:
            made = chosen(MIXTURE, techniques.inside(plan), rank_kind, which)
            own = with_numbers(sheets.units_of([made.variant])[made.variant], made.numbers)
            assert [one.numel(m, s) for one in unit.tensors] == [one.numel(m, s) for one in own.tensors]
            grow = {"": 1, "b": m, "b*s": m * s, "b*s*s": m * s * s}
            for op, other in zip((*unit.forward, *unit.backward), (*own.forward, *own.backward), strict=True):
                assert op.flops * grow[op.per] == other.flops * grow[other.per]
                bound = [number(dim, (m, s)) for dim in (*op.dims, *op.read, *op.written)]
                numbers = {**made.numbers, "b": m, "s": s}
                assert bound == [size_of(dim, numbers) for dim in (*other.dims, *other.read, *other.written)]
        found.append(sheet)
    shared = {id(unit) for sheet in found for unit in sheet.units}
    assert (len(shared) == len(found[0].units)) == (s % tp == 0)


@pytest.mark.big
@pytest.mark.timeout(3600)
def test_shipped_units_are_what_the_code_makes() -> None:
    made = ship.make(ship.ordinary())
    assert made == {key: sheets.shipped().unit(key) for key in sheets.shipped().keys}


@pytest.mark.prove
def test_some_shipped_units_are_what_the_code_makes() -> None:
    """Others in every version of the code and on every day, the same where it fails and is run again. A change of what
    is traced needs ``python -m shardwise.planner.ship``."""
    wanted = ship.ordinary()
    assert {key_of(variant) for variant in wanted} == sheets.shipped().keys
    seed = f"{date.today()} {sorted(sheets.shipped().keys)[0]}"
    made = ship.make(Random(seed).sample([*wanted], 10))
    assert len(made) == 10
    assert [key for key, unit in made.items() if unit != sheets.shipped().unit(key)] == [], f"seed {seed!r}"


def test_the_shipped_file_is_small() -> None:
    """Half of it are units of mixtures, of which a page asks for 32 to 74, a second each to trace."""
    assert len(files("shardwise.planner").joinpath(SHIPPED).read_bytes()) < 800_000


@pytest.mark.rare(9)
@pytest.mark.parametrize(
    ("model", "cluster"),
    [
        ("Mixtral-8x7B-v0.1", "8xH100"),
        ("Qwen3-30B-A3B", "2x8xH100"),
        ("gpt-oss-20b", "1xH100"),
        ("gpt-oss-20b", "8xH100"),
        ("DeepSeek-V2-Lite", "8xH100"),
        ("GLM-4.5-Air", "4x8xH100"),
        ("Qwen3-Next-80B-A3B", "4x8xH100"),
        ("Qwen3.5-9B", "8xH100"),
        ("Llama-3.1-70B", "8xH100"),
    ],
)
def test_the_page_of_a_known_model_traces_nothing(model: str, cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(variants: list[Variant], kept_in: Path) -> None:
        raise AssertionError([sheets.name_of(variant) for variant in variants])

    monkeypatch.setattr(sheets, "traced_anew", refused)
    monkeypatch.setattr(sheets, "_kept", lambda path: None)
    sheets._known.cache_clear()
    assert main(["plan", "--cluster", cluster, f"model={model}"]) == 0


def test_units_that_ship_are_read_one_by_one() -> None:
    units = {f"{i:032x}": pack_unit(traced) for i, traced in enumerate(units_of_spec())}
    file = Shipped(written(units))
    assert file.keys == units.keys() and file.unit("0" * 31 + "f") is None
    for key, packed in units.items():
        assert file.unit(key) == json.loads(json.dumps(packed))


def units_of_spec() -> list[Unit]:
    return [
        trace_once(chosen(SPEC, ADAPTED, RankKind(ADAPTED.layout), unit).variant)
        for unit in ("embedding", 0, 1, "head")
    ]


def test_a_python_without_lzma_traces_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lzma", None)
    assert not Shipped(files("shardwise.planner").joinpath(SHIPPED).read_bytes()).keys


def test_a_unit_survives_being_written_down() -> None:
    for unit in ("embedding", 0, "head"):
        variant = chosen(SPEC, ADAPTED, RankKind(ADAPTED.layout), unit).variant
        assert variant_of(name_of(variant)) == variant
        made = trace_once(variant)
        assert asdict(unpack_unit(json.loads(json.dumps(pack_unit(made))))) == asdict(made)


@pytest.mark.prove
def test_what_does_not_ship_is_traced_in_a_process_of_its_own_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a cache that is spoilt is made again."""
    odd = with_fields(SPEC, norm_placement="both", qk_norm="projection", residual_multiplier=3.0)
    variant = chosen(odd, Plan(), RankKind(), 0).variant
    asked: list[list[Variant]] = []

    def anew(variants: list[Variant], kept_in: Path) -> list[object]:
        asked.append(variants)
        return traced_apart([name_of(variant) for variant in variants], kept_in)

    monkeypatch.setattr(sheets, "traced_anew", anew)
    for again, spoilt in ((False, False), (False, True), (True, False)):
        sheets._known.cache_clear()
        found = sheets.units_of([variant], tmp_path)
        assert asdict(found[variant]) == asdict(trace_once(variant))
        assert len(asked) == (2 if again else 1)
        (file,) = tmp_path.iterdir()
        if spoilt:
            file.write_text("{not json")
    sheets._known.cache_clear()
    assert not _ended(*_process(tmp_path)), "and it ends without a word"


@pytest.mark.parametrize(("module", "file"), [("shardwise.models.latent", "latent.py"), ("json.tool", "tool.py")])
def test_an_edit_of_a_mixer_voids_its_units_alone(monkeypatch: pytest.MonkeyPatch, module: str, file: str) -> None:
    """Of a package's, too."""
    monkeypatch.setitem(sheets.MIXERS, "latent", replace(sheets.MIXERS["latent"], module=f"{module}:Any"))
    both = [
        chosen(spec, Plan(), RankKind(Layout()), 0).variant for spec in (SPEC, from_hf(config_of("deepseek_v2"), "x"))
    ]
    before = [sheets.digest_of(each) for each in both]
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: real(path) + b"#" * (path.name == file))
    sheets._digest.cache_clear()
    after = [sheets.digest_of(each) for each in both]
    sheets._digest.cache_clear()
    assert before[0] == after[0] and before[1] != after[1]


def test_an_edit_of_one_technique_does_not_void_the_units_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, adapted = (chosen(SPEC, plan, RankKind(plan.layout), 0).variant for plan in (Plan(), ADAPTED))
    assert {"techniques/lora/__init__.py", "techniques/tp/__init__.py"} < set(adapted.code) and not plain.code
    before = sheets.digest_of(plain), sheets.digest_of(adapted)
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: real(path) + b"#" * (path.parent.name == "lora"))
    sheets._digest.cache_clear()
    after = sheets.digest_of(plain), sheets.digest_of(adapted)
    sheets._digest.cache_clear()
    assert before[0] == after[0] and before[1] != after[1]


@pytest.mark.prove
def test_units_of_other_code_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = next(iter(ship.ordinary()))
    assert sheets.shipped().unit(key_of(variant))
    monkeypatch.setattr(sheets, "digest_of", lambda variant: "another")
    assert sheets.shipped().unit(key_of(variant)) is None


PLANS = """
import sys
from shardwise.cli.app import main

for words in sys.argv[1].split(";"):
    code = main(["plan", *words.split()])
    assert code == 0, (words, code)
    assert "torch" not in sys.modules, words
"""


MIXTURES = ("mixtral-8x7b", "lora-moe-30b", "qlora-gpt-oss-20b", "lora-glm-4.5-air", "lora-deepseek-v3", "deepseek-v3")
NETS = ("sft-qwen3-next-80b", "lora-qwen3.5-9b")
SEARCHED_FOR_LONG = ("continue-8b", "llama-405b-3d", "llama-70b-zero3", "lora-70b", "sft-8b")
"""Three seconds or more each: of many devices, with all that is open."""


def plans_without_torch(directory: Path, words: Iterable[str]) -> None:
    (directory / "a.txt").write_text("one two three\n" * 4000)
    environment = {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "HOME": str(directory)}
    command = [sys.executable, "-c", PLANS, ";".join(words)]
    done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert not (directory / ".cache" / "shardwise" / "sheets").exists()


@pytest.mark.prove
def test_ordinary_plans_need_no_torch(tmp_path: Path) -> None:
    """Known models with one GPU and several, with tensor parallelism, adapters, and 4 bits, and what the README
    plans."""
    mine = "data.path=a.txt data.tokenizer.path=bytes"
    words = (
        f"{mine} model.path=Llama-3.1-8B --cluster 8xH100",
        f"{mine} model.path=SmolLM2-135M --cluster 1xH100",
        f"{mine} model.path=Qwen3-8B --cluster 1xH100 lora.rank=16",
        f"{mine} model.path=Llama-3.1-70B --cluster 2x8xH100 parallel.tp=8",
        f"{mine} model.path=Gemma-2-9b --cluster 4xA100 parallel.tp=2 lora.rank=8 lora.frozen=nf4",
        "--model Qwen/Qwen3-0.6B method=sft data.path=mine.jsonl lora=16 --cluster 1xH100",
    )
    plans_without_torch(tmp_path, words)


@pytest.mark.prove
@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.prove)], ids=["few seconds", "many"])
def test_recipes_need_no_torch(tmp_path: Path, long: bool) -> None:
    """Every one that ships, but those of long rows, which try heads and rings at once, and those of mixtures of
    experts and of delta nets, of whose many units only some ship."""
    model = quickstart_model(tmp_path)
    plans_without_torch(
        tmp_path,
        (
            f"{path} --cluster {MEANT_FOR[path.stem]}" + f" {model}" * (path.stem == "sft-tiny")
            for path in FILES
            if "long" not in path.stem and path.stem not in MIXTURES + NETS and (path.stem in SEARCHED_FOR_LONG) == long
        ),
    )


@pytest.mark.matrix(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_as_many_as_the_models(family: str) -> None:
    """Of every family one whose config.json nobody has seen before, with every feature at work."""
    spec = from_hf(config_of(family) | {"vocab_size": 1234, "model_type": family}, family)
    sheet = sheet_of(spec, Plan(), units=traced_here)
    total = sum(times * sum(weight.numel(1, 1) for weight in unit.weights) for unit, times in sheet.repeated())
    assert total == parameter_count(spec)


WINDOWED = with_fields(
    SPEC, num_hidden_layers=4, sliding_window=16, layer_types=(SLIDING, SLIDING, FULL, SLIDING), final_soft_cap=30.0
)
MIXED = with_fields(WINDOWED, nope_layers=(1,))


@pytest.mark.parametrize(("spec", "kinds", "sorts"), [(SPEC, 1, 1), (WINDOWED, 2, 1), (MIXED, 3, 2)])
def test_blocks_of_several_kinds(spec: ModelSpec, kinds: int, sorts: int) -> None:
    """What is not rotated allocates less; a window changes only what attention computes."""
    made = sheet_of(spec, Plan(precision=Precision("bf16")), units=traced_here)
    assert len(made.blocks) == kinds and len({block.forward for block in made.blocks}) == sorts
    assert made.capped == (spec.final_soft_cap is not None)
    assert [made.blocks[kind].window for kind in made.order] == [
        spec.attention.sliding_window
        if spec.attention.layer_types and spec.attention.layer_types[layer] == SLIDING
        else None
        for layer in range(spec.num_hidden_layers)
    ]


def test_a_block_is_bound_to_its_own_width_and_priced_by_it() -> None:
    """One trace serves both. Each of the three matrices of an MLP has d * f weights of four bytes, and twice as many
    operations a token forward, four times as many backward."""
    wide, narrow, plan = 320, 192, Plan(batch=Batch(1, 1, 64))
    spec = replace(SPEC, intermediate_sizes=(wide, narrow, narrow))
    assert variants(spec) == variants(SPEC)
    made, plain = (sheet_of(one, plan, units=traced_here) for one in (spec, replace(SPEC, intermediate_size=narrow)))
    shapes = [{weight.name: weight.shape for weight in made.blocks[kind].weights} for kind in made.order]
    assert [shape["mlp.up.weight"][0] for shape in shapes] == [wide, narrow, narrow]
    more, less = (folded(techniques.cost(sheet, plan), plan) for sheet in (made, plain))
    wider = 3 * spec.hidden_size * (wide - narrow)
    assert more.top["weights"] - less.top["weights"] == 4 * wider
    assert more.flops - less.flops == 64 * 6 * wider


def variants(spec: ModelSpec) -> set[Variant]:
    return {
        chosen(spec, Plan(), RankKind(), unit).variant for unit in ("embedding", *range(spec.num_hidden_layers), "head")
    }


def test_windows_and_numbers_share_units_but_sorts_of_layers_do_not() -> None:
    assert variants(SPEC) == variants(WINDOWED) != variants(MIXED)
    assert variants(SPEC) == variants(with_fields(SPEC, hidden_size=96, head_dim=6, rope_theta=1e6))
    assert variants(SPEC) != variants(replace(SPEC, norm_placement="both"))


def test_a_name_is_no_part_of_what_is_traced() -> None:
    spec = hf_spec_of("gpt_neox")
    first, again = (chosen(made, Plan(), RankKind(), 0).variant for made in (spec, replace(spec, name="other")))
    assert first == again != chosen(replace(spec, hidden_size=32), Plan(), RankKind(), 0).variant


def test_a_window_saves_arithmetic_beyond_it() -> None:
    """Pairs of query and key are counted one by one."""
    assert seen(9, None) == seen(9, 9) == seen(9, 20) == 81
    for s, window in ((64, 16), (100, 7)):
        pairs = sum(min(rank_kind + 1, window) for rank_kind in range(s))
        assert abs(seen(s, window) / 2 - pairs) <= s
    plan = Plan(Layout(), Batch(1, 1, 64), Shard(), Precision())
    made = (sheet_of(spec, plan) for spec in (with_fields(WINDOWED, sliding_window=None), WINDOWED))
    whole, cut = (folded(techniques.cost(sheet, plan), plan).flops for sheet in made)
    block = sheet_of(SPEC, plan).blocks[0]
    attention = 4 * sum(op.flops for op in (*block.forward, *block.backward) if op.per == "b*s*s")
    assert whole - cut == 3 * attention // 4 * (64 * 64 - seen(64, 16))
