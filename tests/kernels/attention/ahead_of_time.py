"""Compile this folder's kernels for GPUs that are not here: `python -m
tests.kernels.attention.ahead_of_time`.

As tests/kernels/ahead_of_time.py, a line a kernel: registers, spills, shared memory.
"""

import sys

from tests.kernels.ahead_of_time import KernelToCompile, compile_kernel

HEADS = {"G": 8, "GROUP": 4, "GROUP_PAD": 4, "K": 128}
TILE = {"BLOCK": 64, "BLOCK_T": 16}
_INTS = (
    "first_token num_tokens first_head num_heads num_blocks num_rows num_items width num_queries "
    "first_query_block head_elements num_windows own_block first_block first_index stop_index "
    "before "
    "shared first_shared units group G"
)
TYPES = {
    **dict.fromkeys(_INTS.split(), "i32"),
    "scale": "fp32",
    **dict.fromkeys(
        ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "dout_ptr", "slots_ptr", "pooled_ptr"), "*bf16"
    ),
    **dict.fromkeys(
        ("dq_ptr", "dk_ptr", "dv_ptr", "x_ptr", "source_ptr", "target_ptr", "logits_ptr"), "*bf16"
    ),
    **dict.fromkeys(
        ("compressed_ptr", "selected_ptr", "window_ptr", "d_out_ptr", "d_logits_ptr"), "*bf16"
    ),
    **dict.fromkeys(
        ("lse_ptr", "delta_ptr", "slot_lse_ptr", "partial_ptr", "total_ptr", "scores_ptr"), "*fp32"
    ),
    **dict.fromkeys(("maxima_ptr", "d_pooled_ptr"), "*fp32"),
    **dict.fromkeys(("blocks_ptr", "chunks_ptr", "chosen_ptr"), "*i16"),
}
GATHER = HEADS | TILE | {"S": 32, "CHUNK": 512}
UNSHARED = {"SHARED": False, "shared_ptr": None, "first_shared_ptr": None}
BAND = HEADS | TILE | UNSHARED | {"WINDOW": 8, "SHORT": 0, "EXACT": False}
BAND_KEYS = HEADS | TILE | {"BLOCK_T": 8, "WINDOW": 8, "SHORT": 0, "EXACT": False}
EXACT_KEYS = {"EXACT": True, "EXTRA": False, "total_ptr": None}
BAND_NARROW = BAND | {"G": 32, "GROUP": 1, "GROUP_PAD": 1}
WINDOW_SCORES = {
    "BLOCK": 64,
    "BLOCK_T": 32,
    "BLOCK_J": 64,
    "WINDOW": 2,
    "CHUNK": 16,
    "LARGEST_EXPONENT": 80.0,
}
SCORES = {
    "GROUP": 4,
    "K": 128,
    "BLOCK": 64,
    "KEYS": 64,
    "BLOCKS": 2,
    "WINDOW": 8,
    "CHUNK": 16,
    "ROWS": 128,
}
SCORES |= {"SHARED": False}
TOP = {"S": 32, "BLOCK": 64, "BLOCK_T": 1, "WINDOW": 8, "COLUMNS": 512, "CHUNK": 16}
LISTS = {"S": 32, "BLOCK_S": 32, "EMPTY": 32767}
UNWEIGHTED = (
    HEADS | LISTS | {"BLOCK_T": 4, "WEIGHTED": False, "lse_ptr": None, "slot_lse_ptr": None}
)
WINDOWS = {"G": 8, "K": 128, "KEYS": 32}
ROWS = {"H": 32, "K": 128, "BLOCK": 32}
WIDE = {"G": 4, "K": 256}  # Qwen3.5-4B's
GATHER_WIDE = GATHER | WIDE | {"CHUNK": 1024}
AMPERE, HOPPER = 80, 90
WIDE_TILE = {"num_warps": 8, "num_stages": 2}
DEEP_TILE = {"num_warps": 8, "num_stages": 3}


def kernels_of_the_band():
    """Yields each tile for the GPUs that launch it, and each branch of a kernel in one tile.

    A branch is compiled for Ampere, where shared memory is smaller and registers spill first.
    Windows of released models are exact and end within a block.
    """
    narrow = BAND_NARROW | {"SHORT": 12, "EXACT": True}
    shared = BAND | {"BLOCK_T": 32, "SHARED": True}
    shared = {name: value for name, value in shared.items() if value is not None}
    for name, adds in (("_band_forward_kernel", {}), ("_band_dq_kernel", {"ADD": True})):
        overwrites = dict.fromkeys(adds, False)
        exact = BAND | {"BLOCK_T": 32, "SHORT": 12, "EXACT": True} | overwrites
        for gpu, tile, rows in ((AMPERE, WIDE_TILE, 32), (HOPPER, DEEP_TILE, 64)):
            yield name, BAND | {"BLOCK_T": 32} | adds, tile, gpu
            yield name, narrow | {"BLOCK_T": rows} | overwrites, {"num_stages": 2}, gpu
        yield name, exact, WIDE_TILE, AMPERE
        yield name, shared | overwrites, WIDE_TILE, AMPERE
    yield "_band_forward_kernel", BAND | WIDE | {"BLOCK_T": 32}, WIDE_TILE, HOPPER
    name, alone = "_band_dkv_kernel", {"EXTRA": False}
    yield name, BAND_KEYS | alone, {"num_stages": 3}
    yield name, BAND_KEYS | EXACT_KEYS | {"SHORT": 12}, {"num_stages": 3}, AMPERE
    extra = {"EXTRA": True, "dk_ptr": None, "dv_ptr": None}
    yield name, BAND_KEYS | extra, {"num_stages": 3}, AMPERE
    yield name, BAND_KEYS | WIDE | {"BLOCK_T": 16} | alone, WIDE_TILE, HOPPER


KERNELS_TO_COMPILE = {
    "sparse.gather": [
        ("_gather_forward_kernel", GATHER, {"num_stages": 3}),
        ("_gather_backward_kernel", GATHER | {"CHUNK": 1024}, {"num_stages": 3}),
        ("_gather_backward_kernel", GATHER_WIDE, DEEP_TILE, HOPPER),
        ("_gather_backward_kernel", GATHER_WIDE | {"BLOCK_T": 4}, WIDE_TILE, AMPERE),
    ],
    "sparse.combine": [
        ("_combine_kernel", HEADS | LISTS | {"BLOCK_T": 4, "WEIGHTED": True}, {}),
        ("_combine_kernel", UNWEIGHTED, {}, AMPERE),
        ("_add_partials_kernel", {"BLOCK": 64, "K": 128, "PART": 2048}, {}),
    ],
    "sparse.band": [*kernels_of_the_band()],
    "nsa.compression": [
        ("_pool_windows_kernel", WINDOWS | {"BLOCK_W": 16}, {}),
        ("_unpool_kernel", WINDOWS | {"BLOCK_T": 32}, {}),
        ("_rows_kernel", ROWS | {"TO_TILES": True, "ADD": False}, {}),
        ("_rows_kernel", ROWS | {"TO_TILES": False, "ADD": True}, {}),
    ],
    "nsa.gates": [
        ("_gated_sum_kernel", {"K": 128, "BLOCK": 32}, {}),
        ("_gate_backward_kernel", {"BRANCH": 1, "K": 128, "BLOCK": 32}, {}),
    ],
    "sparse.selection": [
        ("_round_keys_kernel", {"K": 128, "BLOCK": 64, "KEYS": 32}, {}),
        ("_scores_kernel", SCORES | {"QUERIES": 4}, WIDE_TILE, AMPERE),
        ("_scores_kernel", SCORES | {"QUERIES": 4}, {"num_warps": 8, "num_stages": 4}, HOPPER),
        ("_scores_kernel", SCORES | {"QUERIES": 1, "SHARED": True}, WIDE_TILE, AMPERE),
        ("_top_kernel", TOP | {"OF_CHUNKS": True}, {"num_warps": 1}),
        ("_top_kernel", TOP | {"OF_CHUNKS": False}, {"num_warps": 1}, AMPERE),
    ],
    "nsa.window_scores": [("_window_scores_kernel", HEADS | WINDOW_SCORES, {"num_stages": 3})],
}


def main(*capabilities: str) -> None:
    for file, kernels in KERNELS_TO_COMPILE.items():
        for name, constants, options, *only in kernels:
            for capability in only or map(int, capabilities or ("80", "90")):
                types = TYPES | {"keys_ptr": "*bf16" if capability < 89 else "*fp8e4nv"}
                types = {n: t for n, t in types.items() if n not in constants}
                kernel = KernelToCompile(name, _Signature(types), constants, **options)
                wide = "_wide" if constants.get("K") == 256 else ""
                c = compile_kernel(f"attention.{file}", kernel, capability)
                print(
                    f"{file.split('.')[1]}.{name} sm_{capability}{wide}: {c.registers} registers, "
                    f"{c.spill_bytes} bytes spilled, {c.shared_bytes} bytes shared"
                )


class _Signature(dict):
    """Types by name; every other pointer is a table of int32."""

    def get(self, name, default=None):
        return super().get(name, "*i32" if name.endswith("_ptr") else default)


if __name__ == "__main__":
    main(*sys.argv[1:])
