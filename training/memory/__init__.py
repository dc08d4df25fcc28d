"""Where the activations and the optimizer state of a training step live, and what that costs in bytes and seconds.

Eight words that this project uses in its own way:

block      One transformer layer: attention and MLP, each with its norm and its residual addition.
placement  Where one block's activations wait for backward: on the GPU, in host memory, or nowhere.
kept       An activation is kept if it is stored from forward to backward, on the GPU or in host memory.
recompute  To compute an activation again in backward, because it was not kept.
offload    To let tensors wait in page-locked host memory: activations for backward, optimizer state for the update.
stage      A part of a step, such as the forward of one layer, with the bytes that are alive at its fullest moment.
footprint  The bytes that an operation takes: what it keeps for backward, and what it needs while it runs.
execution  How a step is run, apart from the model's shape: placements, kernels, tiles, and where optimizer state lives.
"""
