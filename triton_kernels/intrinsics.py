"""Machine operations that numba lacks: prefetch, bits, compares, 64-byte copies and decoding, raw addresses, pread.

Each is a few inlined LLVM instructions; with `NUMBA_DISABLE_JIT=1` plain Python replaces them.
"""

import ctypes
import os

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LINE_BYTES = 64  # a cache line, and the unit of the streaming copy

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


def _replaces(plain):
    """Return a decorator of an intrinsic, which plain Python stands for where nothing is compiled."""
    return (lambda emitted: plain) if numba.config.DISABLE_JIT else intrinsic


def _nothing(*_):
    """Replace a hint where nothing is compiled."""


def _item_pointer(context, builder, array_type, array, index):
    """Return the address of array[index] of a contiguous one-dimensional array, without a bounds check."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


# How near to the core a prefetch brings a line: single items into the first level; whole rows, of which more lines are
# under way than that level can wait for, into the second (18% to 21% faster on an EPYC).
_ITEM, _ROW = 3, 2


def _emit_prefetch(builder, pointer, level):
    function_type = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    read, data_cache = ir.Constant(_I32, 0), ir.Constant(_I32, 1)
    builder.call(function, [pointer, read, ir.Constant(_I32, level), data_cache])


def _item_prefetch(level):
    @_replaces(_nothing)
    def prefetch(typingctx, array, index):
        def codegen(context, builder, signature, args):
            pointer = _item_pointer(context, builder, signature.args[0], args[0], args[1])
            _emit_prefetch(builder, builder.bitcast(pointer, _I8.as_pointer()), level)
            return context.get_dummy_value()

        return types.void(array, types.int64), codegen

    return prefetch


prefetch, prefetch_line = _item_prefetch(_ITEM), _item_prefetch(_ROW)


@_replaces(_nothing)
def prefetch_address(typingctx, address):
    def codegen(context, builder, signature, args):
        _emit_prefetch(builder, builder.inttoptr(args[0], _I8.as_pointer()), _ROW)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _plain_trailing_zeros(value):
    value = int(value)
    return (value & -value).bit_length() - 1 if value else 64


@_replaces(_plain_trailing_zeros)
def trailing_zeros(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), codegen


@_replaces(lambda value: int(value).bit_count())
def popcount(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen


EQUAL_ITEMS = 32  # that `equal_items` compares


def _spread(builder, vector, value):
    """Return a vector that has a value in every lane."""
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count))


def _plain_equal_items(array, index, value):
    """Return a mask of the EQUAL_ITEMS integers from `index` on that equal a value, the first in the lowest bit."""
    return sum(1 << i for i, item in enumerate(array[index : index + EQUAL_ITEMS].tolist()) if item == value)


@_replaces(_plain_equal_items)
def equal_items(typingctx, array, index, value):
    def codegen(context, builder, signature, args):
        pointer = _item_pointer(context, builder, signature.args[0], args[0], args[1])
        items = ir.VectorType(pointer.type.pointee, EQUAL_ITEMS)
        near = builder.load(builder.bitcast(pointer, items.as_pointer()), align=1)
        same = builder.icmp_signed("==", near, _spread(builder, items, args[2]))
        return builder.zext(builder.bitcast(same, _I32), _I64)

    return types.uint64(array, types.int64, array.dtype), codegen


def _plain_pread(descriptor, address, count, offset):
    try:
        found = os.pread(int(descriptor), int(count), int(offset))
    except OSError:
        return -1
    ctypes.memmove(int(address), found, len(found))
    return len(found)


# The system's own call: compiled loops read files without the interpreter, many threads at a time.
pread = types.ExternalFunction("pread", types.int64(types.int32, types.uintp, types.uint64, types.int64))
if numba.config.DISABLE_JIT:
    pread = _plain_pread


def _store_line(builder, value, target, streaming):
    store = builder.store(value, target, align=LINE_BYTES if streaming else 1)
    if streaming:
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))


def _line_copy(streaming):
    """Return the copy of a line from an address to an item of an array."""

    @_replaces(lambda target, at, address: ctypes.memmove(target[at:].ctypes.data, int(address), LINE_BYTES))
    def copy(typingctx, target, target_index, address):
        def codegen(context, builder, signature, args):
            line = ir.VectorType(_I64, LINE_BYTES // 8).as_pointer()
            to = builder.bitcast(_item_pointer(context, builder, signature.args[0], args[0], args[1]), line)
            _store_line(builder, builder.load(builder.inttoptr(args[2], line), align=1), to, streaming)
            return context.get_dummy_value()

        return types.void(target, types.int64, types.int64), codegen

    return copy


copy_line_from, stream_line_from = (_line_copy(streaming) for streaming in (False, True))


@_replaces(lambda target, at, address: ctypes.memmove(target[at:].ctypes.data, int(address), target.itemsize))
def copy_item_from(typingctx, target, target_index, address):
    def codegen(context, builder, signature, args):
        to = _item_pointer(context, builder, signature.args[0], args[0], args[1])
        builder.store(builder.load(builder.inttoptr(args[2], to.type), align=1), to)
        return context.get_dummy_value()

    return types.void(target, types.int64, types.int64), codegen


def _plain_copy_bytes(target, target_index, source, source_index, count):
    target[target_index : target_index + count] = source[source_index : source_index + count]


@_replaces(_plain_copy_bytes)
def copy_bytes(typingctx, target, target_index, source, source_index, count):
    def codegen(context, builder, signature, args):
        to = _item_pointer(context, builder, signature.args[0], args[0], args[1])
        source = _item_pointer(context, builder, signature.args[2], args[2], args[3])
        cgutils.raw_memcpy(builder, to, source, args[4], 1)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), codegen


def _line_decoding(bits, streaming):
    """Return the function that decodes a line of float32: signed codes times step, each rounded once; or bfloat16."""
    items, code_bytes = LINE_BYTES // 4, LINE_BYTES // 4 * bits // 8

    def plain(target, target_index, address, step):
        if bits == 16:
            upper = np.frombuffer(ctypes.string_at(int(address), code_bytes), np.uint16)
            target[target_index : target_index + items] = (upper.astype(np.uint32) << 16).view(np.float32)
            return
        codes = np.frombuffer(ctypes.string_at(int(address), code_bytes), np.int8)
        if bits == 4:
            codes = np.stack([codes << 4 >> 4, codes >> 4], 1).reshape(-1)
        target[target_index : target_index + items] = codes.astype(np.float32) * step

    @_replaces(plain)
    def decode(typingctx, target, target_index, address, step):
        def codegen(context, builder, signature, args):
            line = ir.VectorType(ir.FloatType(), items)
            packed = ir.VectorType(_I16, items) if bits == 16 else ir.VectorType(_I8, code_bytes)
            to = _item_pointer(context, builder, signature.args[0], args[0], args[1])
            codes = builder.load(builder.inttoptr(args[2], packed.as_pointer()), align=1)
            if bits == 16:  # the upper half of a float32
                words = ir.VectorType(_I32, items)
                upper = builder.shl(builder.zext(codes, words), ir.Constant(words, [16] * items))
                _store_line(builder, builder.bitcast(upper, line), builder.bitcast(to, line.as_pointer()), streaming)
                return context.get_dummy_value()
            if bits == 4:
                half = ir.Constant(packed, [4] * packed.count)
                low, high = builder.ashr(builder.shl(codes, half), half), builder.ashr(codes, half)
                order = [i // 2 + i % 2 * packed.count for i in range(items)]
                codes = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, items), order))
            values = builder.fmul(builder.sitofp(codes, line), _spread(builder, line, args[3]))
            _store_line(builder, values, builder.bitcast(to, line.as_pointer()), streaming)
            return context.get_dummy_value()

        return types.void(target, types.int64, types.int64, types.float32), codegen

    return decode


decode_line16, stream_decoded_line16 = (_line_decoding(16, streaming) for streaming in (False, True))
decode_line8, stream_decoded_line8 = (_line_decoding(8, streaming) for streaming in (False, True))
decode_line4, stream_decoded_line4 = (_line_decoding(4, streaming) for streaming in (False, True))


@_replaces(lambda address: np.frombuffer(ctypes.string_at(int(address), 4), np.float32)[0])
def float_at(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], ir.FloatType().as_pointer()), align=1)

    return types.float32(types.int64), codegen


def _plain_bfloat_at(address):
    upper = np.frombuffer(ctypes.string_at(int(address), 2), np.uint16)
    return (upper.astype(np.uint32) << 16).view(np.float32)[0]


@_replaces(_plain_bfloat_at)
def bfloat_at(typingctx, address):
    def codegen(context, builder, signature, args):
        upper = builder.load(builder.inttoptr(args[0], _I16.as_pointer()), align=1)
        return builder.bitcast(builder.shl(builder.zext(upper, _I32), ir.Constant(_I32, 16)), ir.FloatType())

    return types.float32(types.int64), codegen


@_replaces(lambda address: np.frombuffer(ctypes.string_at(int(address), 1), np.int8)[0])
def byte_at(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], _I8.as_pointer()), align=1)

    return types.int8(types.int64), codegen


@_replaces(_nothing)
def store_fence(typingctx):
    def codegen(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@_replaces(lambda array, index: array[index : index + 8].view(np.uint64)[0])
def word_at(typingctx, array, index):
    """Return the eight bytes of a uint8 array from `index` on, the first one lowest, without a bounds check."""

    def codegen(context, builder, signature, args):
        pointer = _item_pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.load(builder.bitcast(pointer, _I64.as_pointer()), align=1)

    return types.uint64(array, types.int64), codegen
