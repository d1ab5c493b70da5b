"""The folders of the C library that a package contains: the header `mlstate/kv.h`, the library."""

from __future__ import annotations

import os

from ._common.set_module import set_module

_PACKAGE = os.path.dirname(os.path.abspath(__file__))


@set_module("mlstate")
def get_include() -> str:
    """Return the folder to pass to a C compiler as ``-I``, for ``#include <mlstate/kv.h>``.

    Returns
    -------
    str
        An absolute path. The header needs C11 or C++11, and neither Python nor NumPy.

    See Also
    --------
    get_library_dir : The folder of the library to link.

    Examples
    --------
    >>> import os, mlstate
    >>> os.listdir(os.path.join(mlstate.get_include(), "mlstate"))
    ['kv.h']
    """
    return os.path.join(_PACKAGE, "include")


@set_module("mlstate")
def get_library_dir() -> str:
    """Return the folder to pass to a linker as ``-L``, for ``-lmlstate_kv -lpthread -lm``.

    Returns
    -------
    str
        An absolute path. The folder contains the static library ``libmlstate_kv.a`` and the
        shared one: ``libmlstate_kv.so.1``, on macOS ``libmlstate_kv.1.dylib``.

    See Also
    --------
    get_include : The folder of the header.

    Notes
    -----
    Packages contain no links, so ``-lmlstate_kv`` finds the static library. To link the shared
    one, pass its path, and ``-Wl,-rpath,FOLDER`` with the folder in which the program finds it.

    Examples
    --------
    >>> import os, mlstate
    >>> "libmlstate_kv.a" in os.listdir(mlstate.get_library_dir())
    True
    """
    return os.path.join(_PACKAGE, "lib")
