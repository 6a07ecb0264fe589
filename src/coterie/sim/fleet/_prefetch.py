"""Asking for memory before it is needed, in compiled code.

A fleet decodes hundreds of requests at once, each from its own place in a recording that no cache holds: waiting for
these rows took half of the counting. Nothing but time depends on it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, array: Any, row: Any, column: Any) -> Any:  # noqa: ARG001  (numba's signature)
    """Bring the cache line of array[row, column] near; the place may lie past the end."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        held = context.make_array(kind)(context, builder, arguments[0])
        place = cgutils.get_item_pointer(context, builder, kind, held, list(arguments[1:]), wraparound=False)
        address = builder.bitcast(place, ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        shape = ir.FunctionType(ir.VoidType(), [address.type, word, word, word])
        call = cgutils.get_or_insert_function(builder.module, shape, "llvm.prefetch.p0")
        builder.call(call, [address, word(0), word(3), word(1)])  # to read, keep near, data
        return context.get_dummy_value()

    return types.void(array, row, column), generate
