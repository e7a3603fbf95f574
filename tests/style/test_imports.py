"""What may import what, beyond the layers that import-linter holds."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from itertools import chain

import pytest

import shardwise
from shardwise import techniques
from shardwise.spec.launchers import LAUNCHERS
from shardwise.spec.methods import LOSSES, METHODS
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.pipelines import PIPELINES
from tests.style.source import ROOT, Import, Source, imports, report, sources, target

SLOW_OR_OPTIONAL = {
    "torch",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "pyarrow",
    "datasets",
    "fsspec",
    "rich",
    "psutil",
    "ruamel",
    "tensorboard",
    "wandb",
    "mlflow",
    "trackio",
    "peft",
    "torchao",
    "bitsandbytes",
    "liger_kernel",
    "lzma",
    "jinja2",
}
"""Libraries that cost time or may be absent, so that a function may import them when it needs them."""

WITHOUT_TORCH = ("shardwise.errors", "shardwise.spec", "shardwise.cli", "shardwise.techniques", "shardwise.planner")
WITH_TORCH = {
    "shardwise.planner.hf_units",
    "shardwise.planner.trace",
    "shardwise.planner.tracer",
    "shardwise.planner.recorder",
    "shardwise.planner.ship",
    "shardwise.techniques.cp.ring_attention",
    "shardwise.techniques.cp.exchange",
    "shardwise.techniques.cp.delta_states",
    "shardwise.techniques.cp.ulysses",
    "shardwise.techniques.ep.dispatch",
    "shardwise.techniques.lora.joint",
    "shardwise.techniques.offload.activations",
    "shardwise.techniques.product",
    "shardwise.techniques.offload.weights",
    "shardwise.techniques.offload.host_copies",
    "shardwise.techniques.offload.scratch",
    "shardwise.techniques.offload.streamed",
    "shardwise.techniques.offload.rooms",
    "shardwise.techniques.float8.codes",
    "shardwise.techniques.float8.scaled",
    "shardwise.techniques.tally",
    "shardwise.techniques.lora.adapter",
    "shardwise.techniques.device_tables",
    "shardwise.techniques.tp.cut_norm",
    "shardwise.techniques.tp.row_counts",
    "shardwise.techniques.pp.later",
    "shardwise.techniques.lora.dora",
    "shardwise.techniques.lora.dropout",
    "shardwise.techniques.frozen_float8.eightbit",
    "shardwise.techniques.nf4.fourbit",
    "shardwise.techniques.stored_matrix",
    "shardwise.techniques.selective",
    "shardwise.techniques.optim.adafactor",
    "shardwise.techniques.optim.adamw",
    "shardwise.techniques.optim.elementwise",
    "shardwise.techniques.optim.lion",
    "shardwise.techniques.optim.moments",
    "shardwise.techniques.optim.muon",
    "shardwise.techniques.optim.rounding",
    "shardwise.techniques.optim.sgd",
}
"""What traces the real model: loaded only for a model whose sheet does not ship with the package."""

ALSO_WITHOUT_TORCH = {"shardwise", "shardwise.models.config", "shardwise.models.known", "shardwise.models.roles"}
DISTRIBUTION = {"huggingface_hub": "huggingface-hub", "ruamel": "ruamel.yaml"}


def names() -> set[str]:
    return {source.name for source in sources()}


def ours(source: Source, keep: object = lambda imported: True) -> set[str]:
    """Modules of the package that ``source`` imports, by the imports that ``keep`` accepts."""
    assert callable(keep)
    return {found for imported in imports(source) if keep(imported) and (found := target(imported, names()))}


def test_no_cycle() -> None:
    """Imports inside functions count too: two modules that need each other are one module."""
    graph = {s.name: ours(s, lambda imported: not imported.typing_only) - {s.name} for s in sources()}
    found: list[str] = []
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for following in sorted(graph[name]):
                visit(following, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())
    report(found, "no import cycle")


@cache
def is_slow(name: str) -> bool:
    """Whether importing this module of ours imports a slow or optional library."""
    source = next(source for source in sources() if source.name == name)
    at_import = [imported for imported in imports(source) if not imported.inside and not imported.typing_only]
    if any(imported.module.partition(".")[0] in SLOW_OR_OPTIONAL for imported in at_import):
        return True
    return any(is_slow(found) for found in ours(source, at_import.__contains__) if found != name)


def belongs_inside(imported: Import) -> bool:
    found = target(imported, names())
    return imported.module.partition(".")[0] in SLOW_OR_OPTIONAL or (found is not None and is_slow(found))


def test_imports_inside_functions_are_of_slow_libraries() -> None:
    wrong = [
        source.at(imported.line, imported.module)
        for source in sources()
        for imported in imports(source)
        if imported.inside and not imported.typing_only and not belongs_inside(imported)
    ]
    report(wrong, "imports stand at the top, unless they load a library that is slow or may be absent")


def test_torch_is_not_loaded_by_what_must_start_fast() -> None:
    """One process imports each of them in turn and says which one brought torch, transformers or numpy in."""
    light = [
        source.name
        for source in sources()
        if (source.name.startswith(WITHOUT_TORCH) and source.name not in WITH_TORCH)
        or source.name in ALSO_WITHOUT_TORCH
    ]
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "    if heavy: sys.exit(f'{name} imports {sorted(heavy)}')\n"
    )
    command = [sys.executable, "-c", program, *light]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "src")}, timeout=60)
    assert done.returncode == 0, done.stderr


def test_what_starts_processes_says_where_they_may_look_for_code() -> None:
    """Or they would run what lies in the working directory."""
    found = [
        source.at(imported.line, f"{imported.module} without shardwise.spec.safe_path")
        for source in sources()
        for imported in imports(source)
        if (imported.module == "subprocess" or imported.name in ("get_context", "ProcessPoolExecutor"))
        and not any(other.module == "shardwise.spec.safe_path" for other in imports(source))
    ]
    report(found, "what starts Python processes keeps them from running code of the working directory")


def test_private_names_of_torch_stand_in_one_file() -> None:
    found = [
        offence
        for source in sources()
        if source.name != "shardwise.distributed.torch_private"
        for offence in [*private_imports(source), *private_attributes(source)]
    ]
    report(found, "private names of torch are used in distributed/torch_private.py only")


UNDERSCORED_BUT_DOCUMENTED = ("torch.utils._python_dispatch", "torch.utils._pytree", "torch._subclasses.fake_tensor")
"""Modules that torch's own documents tell users to import: dispatch modes, pytrees, fake tensors."""


def private_imports(source: Source) -> list[str]:
    return [
        source.at(imported.line, f"{imported.module} {imported.name or ''}")
        for imported in imports(source)
        if imported.module.partition(".")[0] == "torch"
        and imported.module not in UNDERSCORED_BUT_DOCUMENTED
        and any(part.startswith("_") for part in [*imported.module.split("."), imported.name or ""])
    ]


def private_attributes(source: Source) -> list[str]:
    """Chains such as ``torch.distributed._x``. Allowed: ``torch._foreach_*``, documented though underscored, and
    operators under ``torch.ops``, whose names are torch's stable identifiers of kernels."""
    modules = {"torch"} | {
        (imported.name or imported.module).partition(".")[0]
        for imported in imports(source)
        if imported.module.startswith("torch") and (imported.name or "torch").islower()
    }
    modules |= aliases(source)
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            chain = ast.unparse(node.value)
            first = re.split(r"[.(\[]", chain)[0]
            if first in modules and not node.attr.startswith("_foreach_") and "ops." not in f"{chain}.":
                found.append(source.at(node, f"{chain}.{node.attr}"))
    return found


def aliases(source: Source) -> set[str]:
    """Names given by ``import torch.x as y``."""
    return {
        alias.asname
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname and alias.name.startswith("torch")
    }


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_library_is_declared_and_pinned() -> None:
    """A library that is imported is a dependency of the package, and constraints.txt pins every dependency."""
    declared = project()["project"]
    assert isinstance(declared, dict)
    required = [*declared["dependencies"], *chain.from_iterable(declared["optional-dependencies"].values())]
    known = {re.split(r"[<>=~!\[ ]", line)[0].lower() for line in required}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if "==" in line}
    normal = {name.replace("_", "-") for name in known}
    foreign = [
        source.at(imported.line, f"{library} is not in pyproject.toml")
        for source in sources()
        for imported in imports(source)
        if (library := imported.module.partition(".")[0]) not in sys.stdlib_module_names | {"shardwise"}
        and DISTRIBUTION.get(library, library).lower() not in normal
    ]
    report(foreign, "what is imported is declared")
    unpinned = sorted(normal - {name.replace("_", "-") for name in pinned})
    report(unpinned, "constraints.txt pins every direct dependency")


def test_what_ranks_send_one_another_is_not_unpickled() -> None:
    """A pickle can run any command. torch's collectives of objects unpickle what arrives, whoever sent it."""
    pipes_of_our_own = ("src/shardwise/prove/pool.py",)
    wrong = [
        source.at(node, node.attr)
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
        and (node.attr.endswith(("_object", "_object_list")) or ast.unparse(node) in ("pickle.loads", "pickle.load"))
        and source.path not in pipes_of_our_own
    ]
    wrong += [
        source.at(node, "torch.load without weights_only=True")
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "torch.load"
        and not any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
    ]
    report(wrong, "objects travel through shardwise.runtime.objects")


def test_the_contract_of_independence_names_every_technique() -> None:
    techniques = sorted(
        source.name
        for source in sources()
        if source.name.startswith("shardwise.techniques.")
        and {"choices", "pins", "check"} <= {n.name for n in source.tree.body if isinstance(n, ast.FunctionDef)}
    )
    tool = project()["tool"]
    assert isinstance(tool, dict)
    contract = next(c for c in tool["importlinter"]["contracts"] if c["name"].startswith("Techniques"))
    assert sorted(contract["modules"]) == techniques


NAMED_BY_THE_RUNTIME = {
    "build": {
        "lora": "the names of what an adapter to begin from holds",
        "offload": "copies what is updated",
        "optim": "builds the optimizer",
        "pp": "the ends of stages are not tied",
    },
    "check_bits": {"compile": "compiled kernels may be other ones on each rank"},
    "export": {"lora": "merges adapters"},
    "fit": {"optim": "an update of size zero"},
    "generate": {"compile": "or it would compile for every length of a text"},
    "own": dict.fromkeys(("compile", "cp", "remat", "shard", "tp"), "changes a user's module, by his arguments"),
    "own_optim": {"optim": "the moments that a user's optimizer begins with"},
    "passes": {"compile": "the loss is compiled", "pp": "whether parts are stages of a pipeline"},
    "pipeline": {"pp": "the order of actions"},
    "state": {"offload": "copies are updated", "optim": "the names of what it trains, and how often it has"},
    "step": {"optim": "the learning rate and the update"},
    "metrics.measure": {"compile": "compiled blocks cannot be watched", "offload": "what is on the host is held too"},
    "metrics.log": {"lora": "FLOPs follow from what is added"},
}
"""By module of the runtime, the techniques that it names, and what for."""
BESIDE_TECHNIQUES = {"dtypes", "events", "quantised", "states", "variant"}
"""What stands beside the techniques and the planner reads: the words that both speak."""
WITHIN_A_STEP = (
    "before_waiting",
    "before_micro_batch",
    "after_micro_batch",
    "before_input_gradients",
    "after_weight_gradients",
    "after_backward",
    "after_inference",
)


def test_the_runtime_names_no_technique_for_what_it_does_within_a_step() -> None:
    """That is folded over ORDER (techniques/__init__.py): whoever named one by one would forget one."""
    known = {technique.__name__: technique.__name__.rpartition(".")[2] for technique in techniques.ORDER}
    runtime = [source for source in sources() if source.name.startswith("shardwise.runtime.")]
    found: dict[str, set[str]] = {}
    for source in runtime:
        imported = {known.get(".".join(name.split(".")[:3])) for name in ours(source)}  # of a folder, any file
        if named := imported - {None}:
            found[source.name.removeprefix("shardwise.runtime.")] = named
    assert found == {module: set(why) for module, why in NAMED_BY_THE_RUNTIME.items()}
    wrong = [
        source.at(node, ast.unparse(node))
        for source in runtime
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and node.attr in WITHIN_A_STEP and ast.unparse(node.value) != "techniques"
    ]
    report(wrong, "what techniques do within a step is called through techniques/__init__.py")


def test_the_planner_names_no_technique_and_no_strategy() -> None:
    """What a technique holds, sends and takes at least, which of its settings are simpler and what of them is searched
    is asked through techniques/__init__.py."""
    known = {technique.__name__.rpartition(".")[2] for technique in techniques.ORDER}
    planner = [source for source in sources() if source.name.startswith("shardwise.planner.")]
    named = set[str]()
    for source in planner:
        named |= {name.split(".")[2] for name in ours(source) if name.startswith("shardwise.techniques.")}
    assert not named & known
    assert named == BESIDE_TECHNIQUES
    words = re.compile(rf"\b({'|'.join((*techniques.STRATEGIES, 'hsdp'))})\b")
    wrong = [
        source.at(number, match.group())
        for source in planner
        for number, line in enumerate(source.text.splitlines(), 1)
        for match in words.finditer(line)
    ]
    report(wrong, "a strategy's name stands in techniques/shard")


NAMED_BY_NOBODY = {
    "methods": ({*METHODS, *LOSSES}, "shardwise.methods"),
    "optimizers": ({*OPTIMIZERS}, "shardwise.techniques.optim"),
    "launchers": ({*LAUNCHERS}, "shardwise.launch"),
    "pipelines": ({*PIPELINES}, "shardwise.techniques.pp"),
}
"""What is asked of their rows (shardwise/spec/), never by name; and where their programs are."""


@pytest.mark.parametrize("kind", NAMED_BY_NOBODY)
def test_records_are_not_asked_for_by_name(kind: str) -> None:
    """Outside their own package and the table."""
    words, home = NAMED_BY_NOBODY[kind]
    rooms = tuple(f"shardwise.{room}." for room in ("planner", "runtime", "prove", "cli"))
    asking = [each for each in sources() if each.name.startswith(rooms)]
    wrong = [
        source.at(node, str(node.value))
        for source in asking
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and node.value in words
    ]
    wrong += [
        source.at(imported.line, name)
        for source in asking
        for imported in imports(source)
        if imported.module.startswith(home)
        and ((name := imported.name or "") in words or imported.module.rpartition(".")[2] in words)
    ]
    report(wrong, f"{kind} are records: ask their rows")


def test_every_public_name_is_there() -> None:
    """Names come when they are first asked for, so that a stale one would be noticed by nobody."""
    for name in shardwise.__all__:
        value = getattr(shardwise, name)
        assert getattr(value, "__name__", name) == name
    assert set(shardwise.__all__) <= set(dir(shardwise))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = shardwise.trian
