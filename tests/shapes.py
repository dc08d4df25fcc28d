"""Models of other shapes, for tests: a field of a model, of its blocks or of its layers by name."""

import math
from dataclasses import fields, replace

from kernels.config import ModelConfig
from kernels.gated_delta_net import DeltaNet
from kernels.gated_mlp import GatedMLPPart
from kernels.parts import BlockForm, LayerParts
from kernels.qkv_attention import AttentionPart

OF_ATTENTION = {field.name for field in fields(AttentionPart)}
OF_MLP = {field.name for field in fields(GatedMLPPart)}
OF_BLOCK = {field.name for field in fields(BlockForm)}


def reshape(config, *, kinds=None, rotates=(), mlps=(), **changes):
    """Returns a model with other fields of `ModelConfig`, of its `BlockForm`, or of attention and
    dense MLPs in all layers.

    `kinds` (of attention, or delta nets in its place), `rotates` and `mlps` are patterns over the
    layers.
    """
    of_attention = {name: changes.pop(name) for name in OF_ATTENTION & {*changes}}
    of_mlp = {name: changes.pop(name) for name in OF_MLP & {*changes}}
    of_block = {name: changes.pop(name) for name in OF_BLOCK & {*changes}}
    config = config.with_attention(**of_attention)
    length = math.lcm(len(config.layers), *(len(x) for x in (kinds or (), rotates, mlps) if x))
    layers = [config.parts(layer) for layer in range(length)]
    for i, (mixer, mlp) in enumerate(layers):
        kind = kinds[i % len(kinds)] if kinds else mixer.kind
        if isinstance(kind, DeltaNet):
            mixer = kind
        elif kinds:
            mixer = config.attention.with_kind(kind)
        if rotates:
            mixer = replace(mixer, rotates=rotates[i % len(rotates)])
        mlp = mlps[i % len(mlps)] if mlps else mlp
        layers[i] = LayerParts(mixer, mlp if mlp.routes else replace(mlp, **of_mlp))
    shortest = next(n for n in range(1, length + 1) if layers == layers[:n] * (length // n))
    block = replace(config.block, **of_block)
    return replace(config, layers=tuple(layers[:shortest]), block=block, **changes)


def model_of(
    vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_heads,
    num_key_value_heads, head_dim=128, **changes,
):  # fmt: skip
    """Returns a model of these sizes, with other fields as in `reshape`."""
    attention = AttentionPart(num_heads, num_key_value_heads, head_dim)
    layer = LayerParts(attention, GatedMLPPart(intermediate_size))
    return reshape(ModelConfig(vocab_size, hidden_size, num_hidden_layers, (layer,)), **changes)
