"""The operator that traced calls of a deployment become; a part of the loader of its own.

In a deployment the loader runs this file in its own namespace when torch.compile or torch.export first traces
a call, so no eager call pays for it. Folders without GEMMs do not have it.
"""

from __future__ import annotations

from typing import Any

from cutegen.deploy.launch import PinnedError
from cutegen.deploy.manifest import CPP_LIBRARY, NAMESPACE, OPERATOR
from cutegen.deploy.tensors import dtype_of

__all__ = ["register"]


def register(deployment: Any) -> str:
    """Let torch know the operator of a deployment, and return its name.

    Raises:
        PinnedError: It is that of another folder: a process traces one folder's. Or the library changed.
    """
    torch, folder = deployment.torch, str(deployment.folder.resolve())
    known: Any = torch.ops.cutegen_pinned
    if hasattr(known, "gemm"):  # of a C++ library that was loaded before, unless a folder claimed it
        if getattr(known, "folder", folder) != folder:
            raise PinnedError(f"{NAMESPACE}::gemm is that of {known.folder}; a process traces one folder's")
    elif (deployment.folder / CPP_LIBRARY).exists():
        deployment._read(CPP_LIBRARY, deployment._digest(CPP_LIBRARY))
        torch.ops.load_library(deployment.folder / CPP_LIBRARY)
    else:
        known.registration = _registered(deployment)  # what it registers ends with it
    known.folder = folder
    return f"{NAMESPACE}::gemm"


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
