"""Machine operations that numba does not offer: prefetch, trailing zeros, and 64-byte streaming copies.

Each is a few LLVM instructions put in place; with `NUMBA_DISABLE_JIT=1` plain Python stands in for them.
"""

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LINE_BYTES = 64  # a cache line, and the unit of the streaming copy

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _item_pointer(context, builder, array_type, array, index):
    """Return the address of array[index] of a contiguous one-dimensional array, without a bounds check."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


@intrinsic
def _prefetch(typingctx, array, index):
    def codegen(context, builder, signature, args):
        pointer = _item_pointer(context, builder, signature.args[0], args[0], args[1])
        pointer = builder.bitcast(pointer, _I8.as_pointer())
        function_type = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        read, keep_in_all_levels, data_cache = ir.Constant(_I32, 0), ir.Constant(_I32, 3), ir.Constant(_I32, 1)
        builder.call(function, [pointer, read, keep_in_all_levels, data_cache])
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


@intrinsic
def _trailing_zeros(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), codegen


def _copy_line_codegen(streaming):
    def codegen(context, builder, signature, args):
        line = ir.VectorType(_I64, LINE_BYTES // 8)
        target = _item_pointer(context, builder, signature.args[0], args[0], args[1])
        source = _item_pointer(context, builder, signature.args[2], args[2], args[3])
        target = builder.bitcast(target, line.as_pointer())
        source = builder.bitcast(source, line.as_pointer())
        store = builder.store(builder.load(source, align=1), target, align=LINE_BYTES if streaming else 1)
        if streaming:
            store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))
        return context.get_dummy_value()

    return codegen


@intrinsic
def _stream_line(typingctx, target, target_index, source, source_index):
    return types.void(target, types.int64, source, types.int64), _copy_line_codegen(streaming=True)


@intrinsic
def _copy_line(typingctx, target, target_index, source, source_index):
    return types.void(target, types.int64, source, types.int64), _copy_line_codegen(streaming=False)


@intrinsic
def _store_fence(typingctx):
    def codegen(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


def _plain_prefetch(array, index):
    """Stand in for the prefetch where nothing is compiled."""


def _plain_trailing_zeros(value):
    value = int(value)
    return (value & -value).bit_length() - 1 if value else 64


def _plain_copy_line(target, target_index, source, source_index):
    items = LINE_BYTES // target.itemsize
    target[target_index : target_index + items] = source[source_index : source_index + items]


def _plain_fence():
    """Stand in for the fence where nothing is compiled."""


if numba.config.DISABLE_JIT:
    prefetch, trailing_zeros, store_fence = _plain_prefetch, _plain_trailing_zeros, _plain_fence
    stream_line = copy_line = _plain_copy_line
else:
    prefetch, trailing_zeros, store_fence = _prefetch, _trailing_zeros, _store_fence
    stream_line, copy_line = _stream_line, _copy_line
