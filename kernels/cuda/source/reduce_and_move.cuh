// The gradients of the weights and biases as in reduce.cuh, and v moved, in one launch behind backward.cuh.
//
// Adding up the rows is latency: it waits for the last block of the backward, then for two trips to the L2. Moving v is
// bandwidth and waits for nothing. So the blocks that move fill the multiprocessors while the last blocks of the backward
// end (programmatic dependent launch, sm_90), and the sums are done by the time that v is. The blocks of the sums come
// first, because the others are many.
//
// Traffic: 2 E Hv D bytes a token, and the rows.
#pragma once
#include "streams.cuh"
#include "sums.cuh"

struct ReduceAndMoveArguments {
  Sums sums;
  Heads v_grad, dv;
  long long tokens, sequence;
};
static_assert(sizeof(ReduceAndMoveArguments) == 8 * ARGUMENT_WORDS, "the host packs these arguments in another way");
static_assert(32 * WARPS == SUM_THREADS, "both kinds of blocks are of one launch");

extern "C" __global__ void __launch_bounds__(SUM_THREADS, 2)
norm_rope_reduce_and_move(const __grid_constant__ ReduceAndMoveArguments args) {
  const unsigned adding = unsigned(args.sums.pitch) / SUM_COLUMNS;
  if (blockIdx.x < adding) {
    add_rows(args.sums, blockIdx.x);
  } else {
    move_heads<IN_BYTES, DX_BYTES>(args.v_grad, args.dv, blockIdx.x - adding, args.tokens, args.sequence);
  }
}
