"""The budgets that keep the package small enough to be read."""

from __future__ import annotations

import ast

from tests.style.source import Source, functions, report, sources

PACKAGE_LINES = {
    "spec": 3_409,
    "models": 5_480,
    "data": 3_658,
    "distributed": 546,
    "methods": 473,
    "techniques": 9_036,
    "planner": 4_792,
    "runtime": 7_587,
    "prove": 3_513,
    "pages": 406,
    "launch": 2_493,
    "interop": 2_111,
    "cli": 5_436,
}
"""Lines of code by package: docs/decisions/0013, what later decisions gave for each feature, 0029, which took 454
away, and 0030 to 0045: a sum of 48,940. One is raised only by taking from another."""
FILE_LINES, FUNCTION_LINES, PARAMETERS, METHODS = 400, 60, 6, 15
LINES_PER_ATTRIBUTE_QUESTION = 1_000


def test_lines_of_each_package() -> None:
    counted = dict.fromkeys(PACKAGE_LINES, 0)
    for source in sources():
        package = source.path.removeprefix("src/shardwise/").partition("/")[0]
        if package in counted:  # what stands beside the packages is two small files
            counted[package] += source.code_lines
    over = [f"{name}: {lines} of {most}" for name, most in PACKAGE_LINES.items() if (lines := counted[name]) > most]
    report(over, "a package has at most so many lines of code")


def test_code_is_counted_without_blank_lines_comments_and_docstrings() -> None:
    text = '"""Module."""\n\n# why\nx = """a\nb"""  # two lines\n\n\ndef f():\n    """Its\n    doc."""\n    return x\n'
    assert Source("m", "m.py", text, ast.parse(text)).code_lines == 4


def test_lines_of_a_file() -> None:
    long = [source.at(1, f"{source.lines} lines") for source in sources() if source.lines > FILE_LINES]
    report(long, f"a file has at most {FILE_LINES} lines")


def test_lines_of_a_function() -> None:
    long = [
        source.at(function, f"{function.name} has {length} lines")
        for source in sources()
        for function in functions(source)
        if (length := (function.end_lineno or 0) - function.lineno + 1) > FUNCTION_LINES
    ]
    report(long, f"a function has at most {FUNCTION_LINES} lines")


def test_parameters_of_a_function() -> None:
    many = [
        source.at(function, f"{function.name} has {count} parameters")
        for source in sources()
        for function in functions(source)
        if (count := parameters(function)) > PARAMETERS and not torch_interface(source, function)
    ]
    report(many, f"a function has at most {PARAMETERS} parameters")


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many, ``self``, ``cls`` and the ``ctx`` of an autograd function not counted."""
    given = function.args
    names = [argument.arg for argument in [*given.posonlyargs, *given.args, *given.kwonlyargs]]
    names += [argument.arg for argument in (given.vararg, given.kwarg) if argument is not None]
    return len([name for name in names if name not in ("self", "cls", "ctx")])


def torch_interface(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether torch dictates the parameters: a custom operator and its fake and backward take tensors, not objects."""
    marks = ("custom_op", "register_fake", "register_autograd", "impl")
    return any(mark in ast.unparse(decorator) for decorator in function.decorator_list for mark in marks)


def test_methods_of_a_class() -> None:
    many = []
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                count = sum(isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) for child in node.body)
                if count > METHODS:
                    many.append(source.at(node, f"{node.name} has {count} methods"))
    report(many, f"a class has at most {METHODS} methods")


def test_no_global() -> None:
    found = [
        source.at(node, f"global {', '.join(node.names)}")
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Global)
    ]
    report(found, "no `global`: state is passed")


def test_attributes_are_known_not_asked_for() -> None:
    asked = [
        source.at(node, ast.unparse(node))
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
    ]
    allowed = sum(source.lines for source in sources()) // LINES_PER_ATTRIBUTE_QUESTION
    if len(asked) > allowed:
        report(asked, f"{len(asked)} getattr/hasattr, at most {allowed} (1 in {LINES_PER_ATTRIBUTE_QUESTION} lines)")


PROTOCOL = {
    "shardwise.techniques.": {"choices", "pins", "check", "cost", "apply"},  # what each is: techniques/__init__.py
    "shardwise.cli.": {"run"},  # the command's own help says it
}
"""Functions that a whole family of modules has under one name, described once."""


def described_elsewhere(source: Source, name: str) -> bool:
    return any(source.name.startswith(family) and name in names for family, names in PROTOCOL.items())


def test_public_functions_have_a_docstring() -> None:
    bare = [
        source.at(node, node.name)
        for source in sources()
        for node in source.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
        and not described_elsewhere(source, node.name)
    ]
    report(bare, "a public function says in a docstring what it does")


def test_environment_is_read_in_two_places() -> None:
    """The runtime's one reader is runtime/world.py; the launchers hand variables on. Setting one is not reading."""
    readers = ("shardwise.runtime.world", "shardwise.launch")
    found = [
        source.at(node, ast.unparse(node))
        for source in sources()
        if not source.name.startswith(readers)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute | ast.Name) and reads_environment(node, source.tree)
    ]
    report(found, "environment variables are read in runtime/world.py and launch/ only")


def reads_environment(node: ast.Attribute | ast.Name, tree: ast.Module) -> bool:
    name = ast.unparse(node)
    if name not in ("os.environ", "os.getenv", "os.environb", "environ", "getenv"):
        return False
    for parent in ast.walk(tree):
        if isinstance(parent, ast.Subscript) and parent.value is node:
            return not isinstance(parent.ctx, ast.Store)
        if isinstance(parent, ast.Attribute) and parent.value is node:
            return parent.attr != "update"
    return True


REPLACED = {
    "techniques/product.py": "how a layer computes: dtypes, shares and 4 bits set fields of it",
    "models/blocks.py": "what surrounds a whole block: recompute, compile, inputs that wait, later gradients",
    "techniques/precision.py": "modules of transformers, whose parameters appear in another dtype",
    "techniques/tp/__init__.py": "the embedding's lookup, and the output layer that hands its weight to the loss",
}
"""Where a module gets another forward, and why not through one of the first two."""


def test_forwards_are_replaced_in_few_places() -> None:
    found: dict[str, int] = {}
    for source in sources():
        name = source.path.removeprefix("src/shardwise/")
        if name.startswith(("techniques/", "models/")):
            targets = [
                target for node in ast.walk(source.tree) if isinstance(node, ast.Assign) for target in node.targets
            ]
            count = sum(isinstance(target, ast.Attribute) and target.attr == "forward" for target in targets)
            found |= {name: count} if count else {}
    assert found == dict.fromkeys(REPLACED, 1)
