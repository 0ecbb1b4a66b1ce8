"""Ask for a row of an array before it is needed: random accesses to per-node state then cost half as much."""

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_BYTE, _INT = ir.IntType(8), ir.IntType(32)


@intrinsic
def _prefetch_row(typingctx, array, row):
    def codegen(context, builder, signature, args):
        array_type, row_type = signature.args
        parts = context.make_array(array_type)(context, builder, args[0])
        index = context.cast(builder, args[1], row_type, types.intp)
        offset = builder.mul(index, cgutils.unpack_tuple(builder, parts.strides)[0])
        address = builder.add(builder.ptrtoint(parts.data, offset.type), offset)
        pointer = builder.inttoptr(address, _BYTE.as_pointer())
        function_type = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT, _INT, _INT])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        to_write, all_levels, data_cache = ir.Constant(_INT, 1), ir.Constant(_INT, 3), ir.Constant(_INT, 1)
        builder.call(function, [pointer, to_write, all_levels, data_cache])
        return context.get_dummy_value()

    return types.void(array, row), codegen


def _plain_prefetch_row(array, row):
    """Stand in for the prefetch where nothing is compiled (`NUMBA_DISABLE_JIT=1`)."""


prefetch_row = _plain_prefetch_row if numba.config.DISABLE_JIT else _prefetch_row
