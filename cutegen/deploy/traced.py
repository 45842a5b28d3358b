"""The operators that traced calls of a deployment become; a part of the loader of its own.

In a deployment the loader runs this file in its own namespace when torch.compile or torch.export first traces
a call, so no eager call pays for it.
"""

from __future__ import annotations

from typing import Any

from cutegen.deploy.launch import PinnedError
from cutegen.deploy.manifest import CPP_LIBRARY, NAMESPACE, OPERATOR
from cutegen.deploy.tensors import dtype_of

__all__ = ["register", "register_family"]


def register(deployment: Any) -> str:
    """Let torch know the operator of a deployment, and return its name.

    Raises:
        PinnedError: It is that of another folder: a process traces one folder's. Or the library changed.
    """
    torch = deployment.torch
    known = _claimed(deployment)
    if hasattr(known, "gemm"):  # of a C++ library that was loaded before
        pass
    elif (deployment.folder / CPP_LIBRARY).exists():
        deployment._read(CPP_LIBRARY, deployment._digest(CPP_LIBRARY))
        torch.ops.load_library(deployment.folder / CPP_LIBRARY)
    else:
        known.registration = _registered(deployment)  # what it registers ends with it
    return f"{NAMESPACE}::gemm"


def _claimed(deployment: Any) -> Any:
    """Return torch's operators of pinned kernels, which are those of one folder.

    Raises:
        PinnedError: They are those of another folder.
    """
    known, folder = deployment.torch.ops.cutegen_pinned, str(deployment.folder.resolve())
    if getattr(known, "folder", folder) != folder:
        raise PinnedError(f"{NAMESPACE} are operators of {known.folder}; a process traces one folder's")
    known.folder = folder
    return known


def register_family(
    deployment: Any, calls: Any, dtypes: dict[str, Any], words: dict[str, Any]
) -> tuple[
    tuple[str, ...], tuple[str, ...], tuple[tuple[str, Any, tuple[tuple[int, str, int, int], ...]], ...]
]:
    """Let torch know the operator of a family that is no GEMM, and say how a call of it is put.

    The operator returns nothing: it writes into tensors that exist, so that torch sees what is mutated.

    Args:
        deployment: Whose kernels.
        calls: What answers calls of the family.
        dtypes: Of the tensors of the call, by name.
        words: Texts and flags of the call, by name.

    Returns:
        The names of the operator's parameters; those of the outputs that the call has; and of each output to
        make the name, the dtype, and for each axis its extent: so many times the extent of the axis of a
        tensor, over so many.

    Raises:
        PinnedError: No kernel is pinned for such a call.
    """
    family, tensors = calls.name, calls.tensors
    scalars = [a for a in calls.arguments if a.kind == "scalar"]
    record = _fitting(calls, dtypes, words)
    names = [a.name for a in (*tensors, *scalars)]
    defaults = {name: calls.defaults[name] for name in calls.words if name not in names}
    known = _claimed(deployment)
    if not hasattr(known, family):
        marks = [f"(a{at}!)" if a.kind != "in" else "" for at, a in enumerate(tensors)]
        schema = [f"Tensor{mark}? {a.name}" for mark, a in zip(marks, tensors, strict=True)]
        records = (*calls.said["kernels"], *calls.said["ranges"])
        dtypes_of = {a.name: {r["dtypes"].get(a.name, "") for r in records} for a in scalars}
        # Integers may be symbols: an int would tie a graph to the sizes with which it was traced.
        schema += [f"{'SymInt' if 'int32' in of else 'float'}? {name}" for name, of in dtypes_of.items()]
        kinds = {bool: "bool", str: "str"}
        # Torch passes arguments by name to functions that have a parameter called mode.
        schema += [f"{kinds.get(type(value), 'SymInt')}? {name}_" for name, value in defaults.items()]
        _register_call(deployment, family, f"{family}({', '.join(schema)}) -> ()", (*names, *defaults))
    outputs = [a for a in tensors if a.kind == "out" and a.name in record["dtypes"]]
    made = [
        (
            a.name,
            calls.torch_dtype(record["dtypes"][a.name]),
            tuple(_axis(axis, tensors, dtypes) for axis in a.dims),
        )
        for a in outputs
        if a.name not in dtypes
    ]
    return (*names, *defaults), tuple(a.name for a in outputs), tuple(made)


def _fitting(calls: Any, dtypes: dict[str, Any], words: dict[str, Any]) -> Any:
    """Return a record of the kind of a call, of whatever sizes."""
    short = {name: calls.short_dtype(name, dtype) for name, dtype in dtypes.items()}
    options = {name: words.get(name, value) for name, value in calls.said["options"].items()}
    wanted = {
        a.name for a in calls.tensors if a.name in dtypes or words.get(a.name) is True or not a.optional
    }
    found: dict[str, Any] = {}
    for record in (*calls.said["kernels"], *calls.said["ranges"]):
        calls.require_record(record)
        pinned = record["dtypes"]
        if (
            {a.name for a in calls.tensors if a.name in pinned} == wanted
            and all(pinned[name] == dtype for name, dtype in short.items())
            and record["options"] == options
        ):
            found[str(sorted(pinned.items()))] = record
    if len(found) > 1:
        raise PinnedError(
            f"kernels of {calls.name} with outputs of several dtypes are pinned; pass all outputs"
        )
    if found:
        return next(iter(found.values()))
    asked = " ".join(f"{name}={value}" for name, value in {**short, **options}.items())
    raise PinnedError(f"no kernel of {calls.name} is pinned for {asked}, of whatever sizes")


def _axis(axis: tuple[int, str], tensors: Any, dtypes: dict[str, Any]) -> tuple[int, str, int, int]:
    times, dim = axis
    for a in tensors:
        for at, (per, size) in enumerate(a.dims):
            if size == dim and a.name in dtypes:
                return times, a.name, at, per
    raise PinnedError(f"no tensor of the call tells the size {dim}")


def _register_call(deployment: Any, family: str, schema: str, names: tuple[str, ...]) -> None:
    from torch import library as untyped

    registry: Any = untyped
    torch = deployment.torch

    def run(*values: Any) -> None:
        given = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        deployment.call(family, **given)

    library = registry.Library(NAMESPACE, "FRAGMENT")
    tag = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, tag))
    library.impl(family, run, "CompositeExplicitAutograd")
    registry.register_fake(f"{NAMESPACE}::{family}", lambda *values: None, lib=library)
    setattr(torch.ops.cutegen_pinned, f"registration_{family}", library)  # what it registers ends with it


def _registered(deployment: Any) -> Any:
    from torch import library as untyped

    torch = deployment.torch
    registry: Any = untyped

    def run(a: Any, b: Any, *tensors: Any, **options: Any) -> Any:
        c, bias, scale_a, scale_b = (*tensors, None, None, None, None)[:4]
        scales = () if scale_a is None else (scale_a, scale_b)
        return deployment.gemm(a, b, c=c, bias=bias, scales=scales, **options)

    def shape(a: Any, b: Any, *tensors: Any, out_dtype: Any = None, **options: Any) -> Any:
        dtype = out_dtype or getattr(torch, dtype_of(a)[3])
        return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)  # sizes may be symbols

    library = registry.Library(NAMESPACE, "FRAGMENT")
    library.define(OPERATOR, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("gemm", run, "CompositeExplicitAutograd")
    registry.register_fake(f"{NAMESPACE}::gemm", shape, lib=library)
    return library
