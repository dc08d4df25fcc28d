"""Makes Triton's interpreter 2.5 times as fast, and lets it round to bfloat16 and FP8 as GPUs do.

The interpreter derives types and shapes anew for each operation, which takes longer than NumPy's
arithmetic. Here an operation remembers what it did on operands of the same types. An interpreter
with other parts stays as it is.
"""

import functools

import numpy as np
import torch
from triton import language
from triton.language import core
from triton.runtime import interpreter

BINARY_OPERATIONS = [
    *("add", "sub", "mul", "truediv", "mod", "and_", "or_", "xor_", "minimum", "maximum"),
    *("greater_than", "greater_equal", "less_than", "less_equal", "equal", "not_equal"),
]
INTERPRETER_PARTS = [
    *("_patch_lang", "_LangPatchScope", "_patch_attr", "_get_np_dtype", "TensorHandle"),
    *("InterpreterOptions", "interpreter_semantic", "interpreter_builder"),
]


def patch_interpreter() -> None:
    round_by_torch()
    take_arrays_of_one_element_for_numbers()
    if all(hasattr(interpreter, part) for part in INTERPRETER_PARTS):
        patch_language_once()
        call_builtins_directly()
        compare_types_by_name()
        remember_types()
        remember_shapes()
        remember_binary_operations()


def round_by_torch():
    """Convert between float32 and bfloat16 or FP8 by PyTorch.

    The interpreter itself cuts a bfloat16's bits off, takes FP8's 127 to 64, and NaN to 480.
    """
    convert = interpreter._convert_float
    types = {
        "bf16": (torch.bfloat16, torch.int16, np.uint16),
        "fp8e4nv": (torch.float8_e4m3fn, torch.uint8, np.uint8),
    }

    def convert_or_round(input, input_type, output_type, rounding_mode):
        if input_type.is_fp32() and output_type.name in types:
            narrow, bits, numpy_bits = types[output_type.name]
            return torch.from_numpy(input).to(narrow).view(bits).numpy().view(numpy_bits)
        if output_type.is_fp32() and input_type.name in types:
            narrow, bits, _ = types[input_type.name]
            stored = torch.from_numpy(input).view(bits).view(narrow)
            return stored.float().view(torch.int32).numpy()
        return convert(input, input_type, output_type, rounding_mode)

    interpreter._convert_float = convert_or_round


def take_arrays_of_one_element_for_numbers():
    """Call `item` of an array of one element where a kernel needs a number.

    The interpreter of Triton 3.6 calls int, which NumPy 2.4 and later refuse. Triton 3.7 removes
    the array's dimensions before.
    """
    patch = interpreter._patch_lang_tensor

    def patch_and_take_item(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_take_item


def patch_language_once():
    """Patch triton.language once in a process, not in each launch and for each called function."""
    patch = interpreter._patch_lang
    patched = set()

    @functools.cache
    def languages(function):
        modules = (language, language.core)
        return [value for value in function.__globals__.values() if value in modules]

    def patch_unless_patched(function):
        if not patched.issuperset(languages(function)):
            patch(function)
            patched.update(languages(function))
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_unless_patched


def call_builtins_directly():
    """Call the function below a built-in one, which only checks that it gets a `_semantic`.

    Sums of integers are not computed again in 64 bits: their overflow is reported in the
    interpreter's debug mode alone.
    """
    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder

    def patch_attribute(module, name, member, builder, scope):
        function = getattr(member, "__wrapped__", member)

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(module, name, call)

    interpreter._patch_attr = patch_attribute
    if not builder.options.debug:
        builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def compare_types_by_name():
    unwrap, equals = core._unwrap_if_constexpr, core.dtype.__eq__
    plain = {core.tensor, core.dtype, int, float, bool, str, type(None)}

    def unwrap_at_once(value):
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    def equals_by_name(self, other):
        return self.name == other.name if type(other) is core.dtype else equals(self, other)

    core._unwrap_if_constexpr, core.dtype.__eq__ = unwrap_at_once, equals_by_name


def remember_types():
    """Make each type once, and what tensors of one type have alike."""
    block_type, tensor, handle = core.block_type, core.tensor, interpreter.TensorHandle
    numpy_type, make_type, with_element = (
        interpreter._get_np_dtype,
        block_type.__init__,
        block_type.with_element_ty,
    )
    make_tensor, make_handle = tensor.__init__, handle.__init__
    numpy_types, types, blocks, tensors, checked = {}, {}, {}, {}, set()

    def numpy_type_once(type):
        if type.name not in numpy_types:
            numpy_types[type.name] = numpy_type(type)
        return numpy_types[type.name]

    def make_type_once(self, element_ty, shape):
        key = element_ty.name, *shape
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = {**vars(self)}
        vars(self).update(types[key])

    def with_element_once(self, element):
        key = self.name, element.name
        if key not in blocks:
            blocks[key] = with_element(self, element)
        return blocks[key]

    def make_tensor_of_known_type(self, handle, type):
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = self.shape, self.numel, self.type, self.dtype
        self.handle = handle
        self.shape, self.numel, self.type, self.dtype = tensors[type.name]

    def make_handle_of_known_type(self, data, dtype, attr=None):
        key = dtype.name, data.itemsize
        if key not in checked:
            make_handle(self, data, dtype)
            checked.add(key)
        self.data, self.dtype = data, dtype
        self.attr = {} if attr is None else attr

    interpreter._get_np_dtype = numpy_type_once
    block_type.__init__, block_type.with_element_ty = make_type_once, with_element_once
    block_type.to_ir = lambda self, builder: self
    tensor.__init__, handle.__init__ = make_tensor_of_known_type, make_handle_of_known_type


def remember_shapes():
    """Remember which types are cast or broadcast to themselves, and types with added axes."""
    semantic, tensor, handle = (
        interpreter.interpreter_semantic,
        core.tensor,
        interpreter.TensorHandle,
    )
    cast, broadcast, index = semantic.cast, semantic.broadcast_impl_value, tensor.__getitem__
    alike, types_with_axes = set(), {}

    def cast_if_unlike(input, type, rounding=None):
        return input if input.dtype.name == type.scalar.name else cast(input, type, rounding)

    def broadcast_if_unlike(lhs, rhs):
        key = lhs.type.name, rhs.type.name
        if key in alike:
            return lhs, rhs
        left, right = broadcast(lhs, rhs)
        if left is lhs and right is rhs:
            alike.add(key)
        return left, right

    def add_axes(self, axes, _semantic):
        key = self.type.name, str(axes)
        if key in types_with_axes:
            return tensor(handle(self.handle.data[axes], self.handle.dtype), types_with_axes[key])
        result = index(self, axes, _semantic=semantic)
        if self.type.is_block():
            types_with_axes[key] = result.type
        return result

    semantic.cast, semantic.broadcast_impl_value = cast_if_unlike, broadcast_if_unlike
    tensor.__getitem__ = core.builtin(add_axes)


def remember_binary_operations():
    """Have a binary operation on known types call NumPy's function, which casts and broadcasts.

    For example int32[64] < 100: the first comparison of an int32[64] with 100 is the
    interpreter's, which makes 64 values of 100 and calls np.less. Later comparisons call np.less
    with one 100. A key holds a number's text, because 0.0 equals -0.0, and 1 equals True.
    """
    semantic, tensor, handle = (
        interpreter.interpreter_semantic,
        core.tensor,
        interpreter.TensorHandle,
    )
    recorder = Recorder(interpreter.interpreter_builder)

    def array(value, use):
        if not isinstance(value, tensor):
            return use
        return value.handle.data if use is None else value.handle.data.astype(use)

    def remembered(operate):
        plans = {}

        def operate_as_learnt(lhs, rhs, *options, **named):
            left_key = lhs.type.name if isinstance(lhs, tensor) else repr(lhs)
            right_key = rhs.type.name if isinstance(rhs, tensor) else repr(rhs)
            key = left_key, right_key, options, *named.items()
            if key not in plans and not recorder.is_recording:
                result, plans[key] = recorder.record(operate, lhs, rhs, options, named)
                return result
            plan = plans.get(key)
            if plan is None or recorder.is_recording:
                return operate(lhs, rhs, *options, **named)
            compute, left_use, right_use, handle_type, type, itemsize = plan
            output = compute(array(lhs, left_use), array(rhs, right_use))
            if output.itemsize > itemsize:
                return operate(lhs, rhs, *options, **named)
            return tensor(handle(output, handle_type), type)

        return operate_as_learnt

    for name in BINARY_OPERATIONS:
        setattr(semantic, name, remembered(getattr(semantic, name)))


class Recorder:
    """Records which NumPy function an operation calls, and how it uses both operands."""

    def __init__(self, builder):
        self.is_recording = False
        self.calls = []
        self.compute, self.add_to_pointer = builder.binary_op, builder.create_addptr
        builder.binary_op, builder.create_addptr = self.binary_op, self.create_addptr

    def binary_op(self, lhs, rhs, compute):
        self.calls.append((lhs, rhs, compute))
        return self.compute(lhs, rhs, compute)

    def create_addptr(self, pointer, offset):
        element_bytes = max(1, pointer.get_element_ty().primitive_bitwidth // 8)

        def compute(address, count):
            return address + element_bytes * count.astype(np.uint64)

        self.calls.append((pointer, offset, compute))
        return self.add_to_pointer(pointer, offset)

    def record(self, operate, lhs, rhs, options, named):
        """Returns the operation's result and its plan: None where it is more than one call."""
        self.calls = []
        self.is_recording = True
        try:
            result = operate(lhs, rhs, *options, **named)
        finally:
            self.is_recording = False
        if len(self.calls) != 1:
            return result, None
        [(left, right, compute)] = self.calls
        if self.is_cast_unlike_numpy(lhs, left) or self.is_cast_unlike_numpy(rhs, right):
            return result, None
        uses = self.use(lhs, left), self.use(rhs, right)
        itemsize = result.handle.data.itemsize
        return result, (compute, *uses, result.handle.dtype, result.type, itemsize)

    def is_cast_unlike_numpy(self, value, used):
        if not isinstance(value, core.tensor) or value.handle.dtype.scalar == used.dtype.scalar:
            return False
        types = value.dtype, used.dtype.scalar
        if used.dtype.scalar.is_bool():
            return True
        return not all(t.is_int() or t.name in ("fp16", "fp32", "fp64") for t in types)

    def use(self, value, used):
        """Returns a number as an array, or the type that a tensor's array is cast to, if any."""
        if not isinstance(value, core.tensor):
            return used.data.reshape(-1)[:1].copy()
        is_same = value.handle.dtype.scalar == used.dtype.scalar
        return None if is_same else used.data.dtype
