"""Patches of Triton's interpreter: it takes half of the time, and gives what GPUs give."""

import functools

import torch
import triton
from triton import language
from triton.language import core
from triton.runtime import interpreter


def take_arrays_of_one_element_for_numbers():
    """Have the interpreter of Triton 3.6 call `item` of an array of one element where the kernel needs a number.

    It calls int, which NumPy 2.4 and later refuse. Triton 3.7 removes the array's dimensions before.
    """
    patch = interpreter._patch_lang_tensor

    def patch_and_take_item(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_take_item


def patch_language_once_a_launch():
    """Have Triton's interpreter patch triton.language once in a launch, not for each function that a kernel calls.

    The patching takes half of its time in Triton 3.6 and 3.7. An interpreter with other parts stays as it is.
    """
    if not hasattr(interpreter, "_patch_lang") or not hasattr(interpreter, "_LangPatchScope"):
        return
    patch = interpreter._patch_lang

    @functools.cache
    def languages(function):
        return [value for value in function.__globals__.values() if value is language or value is language.core]

    def patch_unless_patched(function):
        if any(language.core.is_builtin(found.load) for found in languages(function)):
            return patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_unless_patched


def remember_types():
    """Have Triton's interpreter make each type once, and what tensors of one type have alike: a third of its time.

    An interpreter with other parts stays as it is.
    """
    if not hasattr(interpreter, "_get_np_dtype"):
        return
    numpy_type, make_type, make_tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
    numpy_types, types, tensors = {}, {}, {}

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

    def make_tensor_of_known_type(self, handle, type):
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = {**vars(self)}
        vars(self).update(tensors[type.name], handle=handle)

    interpreter._get_np_dtype = numpy_type_once
    core.block_type.__init__, core.tensor.__init__ = make_type_once, make_tensor_of_known_type


def round_to_fp8_by_torch():
    """Have Triton's interpreter convert between float32 and FP8 as GPUs do: its own takes 127 to 64, and NaN to 480."""
    convert = interpreter._convert_float

    def convert_or_round(input, input_dtype, output_dtype, rounding_mode):
        if input_dtype.is_fp32() and output_dtype.is_fp8e4nv():
            return torch.from_numpy(input).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if input_dtype.is_fp8e4nv() and output_dtype.is_fp32():
            return torch.from_numpy(input).view(torch.float8_e4m3fn).float().view(torch.int32).numpy()
        return convert(input, input_dtype, output_dtype, rounding_mode)

    interpreter._convert_float = convert_or_round


def patch_interpreter():
    if triton.__version__.startswith("3.6."):
        take_arrays_of_one_element_for_numbers()
    patch_language_once_a_launch()
    remember_types()
    round_to_fp8_by_torch()
