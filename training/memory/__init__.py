"""Places of a training step's activations, weights and optimizer state, and the bytes and seconds
that they cost.

Nine words have a meaning of their own here:

Block      A transformer layer: a mixer of tokens and an MLP, each with its norm and its residual
           addition. Sparse attention chooses blocks of keys, which are always called so.
Kind       How a layer attends, such as full or window, with its settings. `ModelConfig` has one
           per layer, and `Execution.kinds` replaces them for a run.
Placement  The places where the activations of a block wait for backward: on the GPU, in host
           memory, or nowhere. Also the place where its weights live: the GPU or host memory.
Kept       Stored from forward to backward, on the GPU or in host memory.
Recompute  To compute an activation again in backward, because it was not kept.
Offload    To let tensors wait in page-locked host memory: activations for backward, optimizer
           state for the update.
Visit      The time in which weights that live on the host, or quantized, are on the GPU in bf16:
           while their block runs, and the block before it.
Stage      A part of a step, such as the forward of one layer, with the bytes that are alive at its
           fullest moment.
Execution  How a step is run, apart from the model's shape: placements, kinds, kernels, tiles, and
           where optimizer state lives.
"""
