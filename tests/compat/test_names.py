"""The import shim has the names and the arguments of PyPI `bullmq`, read from the package itself."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
from pathlib import Path
from typing import Final

import pytest

import bullpen.compat.bullmq as shim
from bullpen.compat.bullmq._options import job_arguments
from bullpen.errors import InvalidOption
from tests.interop._pypi import PyBullmqMissing, ensure_environment

MODULES: Final = (
    *("abort_controller", "event_emitter", "flow_producer", "job", "job_scheduler", "queue", "queue_events"),
    *("queue_events_producer", "worker"),
)
NOT_BUILT: Final = {
    # The inside of their loop; a thread of ours renews the locks.
    *("Worker.moveToActive", "Worker.processJob", "Worker.waitForJob"),
    "Worker.extendLocks",
    *("Worker.cancelProcessing", "Worker.getBlockTimeout", "Worker.isConnectionError", "Worker.maximumBlockTimeout"),
    *("Worker.minimumBlockTimeout", "Worker.retryIfFailed", "Worker.runStalledJobsCheck"),
    *("FlowProducer.addChildren", "FlowProducer.addNode", "FlowProducer.addNodes", "FlowProducer.queueFromNode"),
    "MinimalQueue",
}
"""The page about BullMQ says why."""
OURS: Final = {"remove_job", "JobHome"}


@pytest.fixture(scope="session")
def package() -> Path:
    try:
        python = ensure_environment()
    except PyBullmqMissing as missing:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(missing))
    (found,) = python.parents[1].glob("lib/python3*/site-packages/bullmq")
    return found


def public_functions(package: Path, module: str) -> dict[str, list[str]]:
    """Parameters of the public functions of a module, and of the methods of its classes; a class alone has none."""
    found: dict[str, list[str]] = {}
    for node in ast.parse((package / f"{module}.py").read_text()).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = []
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and (
                    member.name == "__init__" or not member.name.startswith("_")
                ):
                    found[f"{node.name}.{member.name}"] = _parameters(member)
    return found


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    extra = [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    extra += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return [name for name in names if name != "self"] + extra


@pytest.mark.parametrize("module", MODULES)
def test_each_method_is_there_with_its_arguments(package: Path, module: str) -> None:
    ours = importlib.import_module(f"bullpen.compat.bullmq.{module}")
    wrong = []
    for name, parameters in public_functions(package, module).items():
        if name in NOT_BUILT or name.partition(".")[0] in NOT_BUILT:
            continue
        owner, _, method = name.partition(".")
        kind = getattr(ours, owner)
        member = inspect.getattr_static(kind, method, None) if method else kind
        if member is None:
            wrong.append(f"{name}: missing")
        elif inspect.isfunction(function := getattr(member, "__func__", member)) and method:
            signature = inspect.signature(function).parameters.values()
            marks: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
            have = [marks.get(each.kind, "") + each.name for each in signature if each.name != "self"]
            if have[: len(parameters)] != parameters:
                wrong.append(f"{name}: {parameters}, here {have}")

    assert wrong == []


def test_what_is_not_built_is_still_theirs(package: Path) -> None:
    """A name that they dropped needs no excuse any more."""
    theirs = {name for module in MODULES for name in public_functions(package, module)}

    assert NOT_BUILT - theirs == set()


def test_the_package_has_the_same_names(package: Path) -> None:
    tree = ast.parse((package / "__init__.py").read_text())
    theirs = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}

    assert theirs - set(shim.__all__) == {"LockManager"}  # locks are renewed by a thread of ours


def test_the_option_dictionaries_have_the_same_names(package: Path) -> None:
    ours = importlib.import_module("bullpen.compat.bullmq.types")
    missing = [
        f"{node.name}.{field.target.id}"
        for file in (package / "types").glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if field.target.id not in getattr(ours, node.name).__annotations__
    ]

    assert missing == []


def test_an_option_that_does_not_exist_is_named_with_the_one_that_was_meant() -> None:
    with pytest.raises(InvalidOption, match=r"jobID: expected the name of a job option .*; did you mean 'jobId'\?"):
        job_arguments({"jobID": "a"})
