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

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


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


def _prefetch_codegen(level):
    def codegen(context, builder, signature, args):
        pointer = _item_pointer(context, builder, signature.args[0], args[0], args[1])
        _emit_prefetch(builder, builder.bitcast(pointer, _I8.as_pointer()), level)
        return context.get_dummy_value()

    return codegen


@intrinsic
def _prefetch(typingctx, array, index):
    return types.void(array, types.int64), _prefetch_codegen(_ITEM)


@intrinsic
def _prefetch_line(typingctx, array, index):
    return types.void(array, types.int64), _prefetch_codegen(_ROW)


@intrinsic
def _prefetch_address(typingctx, address):
    def codegen(context, builder, signature, args):
        _emit_prefetch(builder, builder.inttoptr(args[0], _I8.as_pointer()), _ROW)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _trailing_zeros(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), codegen


@intrinsic
def _popcount(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen


EQUAL_ITEMS = 32  # that `equal_items` compares


@intrinsic
def _equal_items(typingctx, array, index, value):
    def codegen(context, builder, signature, args):
        pointer = _item_pointer(context, builder, signature.args[0], args[0], args[1])
        items = ir.VectorType(pointer.type.pointee, EQUAL_ITEMS)
        near = builder.load(builder.bitcast(pointer, items.as_pointer()), align=1)
        same = builder.insert_element(ir.Constant(items, ir.Undefined), args[2], ir.Constant(_I32, 0))
        same = builder.shuffle_vector(same, same, ir.Constant(ir.VectorType(_I32, EQUAL_ITEMS), [0] * EQUAL_ITEMS))
        return builder.zext(builder.bitcast(builder.icmp_signed("==", near, same), _I32), _I64)

    return types.uint64(array, types.int64, array.dtype), codegen


# The system's own call: compiled loops read files without the interpreter, many threads at a time.
_pread = types.ExternalFunction("pread", types.int64(types.int32, types.uintp, types.uint64, types.int64))


def _copy_line_codegen(streaming, from_address=False):
    def codegen(context, builder, signature, args):
        line = ir.VectorType(_I64, LINE_BYTES // 8)
        target = _item_pointer(context, builder, signature.args[0], args[0], args[1])
        target = builder.bitcast(target, line.as_pointer())
        if from_address:
            source = builder.inttoptr(args[2], line.as_pointer())
        else:
            source = _item_pointer(context, builder, signature.args[2], args[2], args[3])
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
def _stream_line_from(typingctx, target, target_index, address):
    return types.void(target, types.int64, types.int64), _copy_line_codegen(streaming=True, from_address=True)


@intrinsic
def _copy_line_from(typingctx, target, target_index, address):
    return types.void(target, types.int64, types.int64), _copy_line_codegen(streaming=False, from_address=True)


@intrinsic
def _copy_item_from(typingctx, target, target_index, address):
    def codegen(context, builder, signature, args):
        to = _item_pointer(context, builder, signature.args[0], args[0], args[1])
        builder.store(builder.load(builder.inttoptr(args[2], to.type), align=1), to)
        return context.get_dummy_value()

    return types.void(target, types.int64, types.int64), codegen


@intrinsic
def _copy_bytes(typingctx, target, target_index, source, source_index, count):
    def codegen(context, builder, signature, args):
        to = _item_pointer(context, builder, signature.args[0], args[0], args[1])
        source = _item_pointer(context, builder, signature.args[2], args[2], args[3])
        cgutils.raw_memcpy(builder, to, source, args[4], 1)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), codegen


def _decode_line_codegen(bits, streaming):
    """Return a function that decodes signed codes to one line of float32: code times step, each rounded once."""

    def codegen(context, builder, signature, args):
        items = LINE_BYTES // 4
        line = ir.VectorType(ir.FloatType(), items)
        target = _item_pointer(context, builder, signature.args[0], args[0], args[1])
        target = builder.bitcast(target, line.as_pointer())
        packed = ir.VectorType(_I8, items * bits // 8)
        codes = builder.load(builder.inttoptr(args[2], packed.as_pointer()), align=1)
        if bits == 4:
            half = ir.Constant(packed, [4] * packed.count)
            low, high = builder.ashr(builder.shl(codes, half), half), builder.ashr(codes, half)
            order = [i // 2 + i % 2 * packed.count for i in range(items)]
            codes = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, items), order))
        step = builder.insert_element(ir.Constant(line, ir.Undefined), args[3], ir.Constant(_I32, 0))
        step = builder.shuffle_vector(step, step, ir.Constant(ir.VectorType(_I32, items), [0] * items))
        values = builder.fmul(builder.sitofp(codes, line), step)
        store = builder.store(values, target, align=LINE_BYTES if streaming else 4)
        if streaming:
            store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))
        return context.get_dummy_value()

    return codegen


def _decode_line_intrinsic(bits, streaming):
    @intrinsic
    def decode(typingctx, target, target_index, address, step):
        return types.void(target, types.int64, types.int64, types.float32), _decode_line_codegen(bits, streaming)

    return decode


@intrinsic
def _float_at(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], ir.FloatType().as_pointer()), align=1)

    return types.float32(types.int64), codegen


@intrinsic
def _byte_at(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], _I8.as_pointer()), align=1)

    return types.int8(types.int64), codegen


@intrinsic
def _store_fence(typingctx):
    def codegen(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


def _plain_prefetch(array, index):
    """Replace the prefetch where nothing is compiled."""


def _plain_trailing_zeros(value):
    value = int(value)
    return (value & -value).bit_length() - 1 if value else 64


def _plain_popcount(value):
    return int(value).bit_count()


def _plain_equal_items(array, index, value):
    """Return a mask of the EQUAL_ITEMS integers from `index` on that equal a value, the first in the lowest bit."""
    return sum(1 << i for i, item in enumerate(array[index : index + EQUAL_ITEMS].tolist()) if item == value)


def _plain_pread(descriptor, address, count, offset):
    try:
        found = os.pread(int(descriptor), int(count), int(offset))
    except OSError:
        return -1
    ctypes.memmove(int(address), found, len(found))
    return len(found)


def _plain_copy_line(target, target_index, source, source_index):
    items = LINE_BYTES // target.itemsize
    target[target_index : target_index + items] = source[source_index : source_index + items]


def _plain_copy_bytes(target, target_index, source, source_index, count):
    target[target_index : target_index + count] = source[source_index : source_index + count]


def _plain_prefetch_address(address):
    """Replace the prefetch where nothing is compiled."""


def _plain_copy_line_from(target, target_index, address):
    ctypes.memmove(target[target_index:].ctypes.data, int(address), LINE_BYTES)


def _plain_copy_item_from(target, target_index, address):
    ctypes.memmove(target[target_index:].ctypes.data, int(address), target.itemsize)


def _plain_float_at(address):
    return np.frombuffer(ctypes.string_at(int(address), 4), np.float32)[0]


def _plain_byte_at(address):
    return np.frombuffer(ctypes.string_at(int(address), 1), np.int8)[0]


def _plain_decode_line8(target, target_index, address, step):
    codes = np.frombuffer(ctypes.string_at(int(address), LINE_BYTES // 4), np.int8)
    target[target_index : target_index + len(codes)] = codes.astype(np.float32) * step


def _plain_decode_line4(target, target_index, address, step):
    packed = np.frombuffer(ctypes.string_at(int(address), LINE_BYTES // 8), np.int8)
    codes = np.stack([packed << 4 >> 4, packed >> 4], 1).reshape(-1)
    target[target_index : target_index + len(codes)] = codes.astype(np.float32) * step


def _plain_fence():
    """Replace the fence where nothing is compiled."""


if numba.config.DISABLE_JIT:
    prefetch, trailing_zeros, store_fence = _plain_prefetch, _plain_trailing_zeros, _plain_fence
    prefetch_line, popcount, pread = _plain_prefetch, _plain_popcount, _plain_pread
    equal_items = _plain_equal_items
    stream_line = copy_line = _plain_copy_line
    copy_bytes = _plain_copy_bytes
    prefetch_address, copy_item_from = _plain_prefetch_address, _plain_copy_item_from
    stream_line_from = copy_line_from = _plain_copy_line_from
    float_at, byte_at = _plain_float_at, _plain_byte_at
    decode_line8 = stream_decoded_line8 = _plain_decode_line8
    decode_line4 = stream_decoded_line4 = _plain_decode_line4
else:
    prefetch, trailing_zeros, store_fence = _prefetch, _trailing_zeros, _store_fence
    prefetch_line, popcount, pread = _prefetch_line, _popcount, _pread
    equal_items = _equal_items
    stream_line, copy_line = _stream_line, _copy_line
    copy_bytes = _copy_bytes
    prefetch_address, copy_item_from = _prefetch_address, _copy_item_from
    stream_line_from, copy_line_from = _stream_line_from, _copy_line_from
    float_at, byte_at = _float_at, _byte_at
    decode_line8, stream_decoded_line8 = (_decode_line_intrinsic(8, streaming) for streaming in (False, True))
    decode_line4, stream_decoded_line4 = (_decode_line_intrinsic(4, streaming) for streaming in (False, True))
