// The gradients of the weights and biases as in reduce.cuh, and dx of the last tokens, in one launch behind backward.cuh.
//
// Adding up the rows is latency: it waits for the last block of the backward, then for two trips to the L2, and the memory
// is idle meanwhile. So the backward takes the sums of the last tokens but does not write their dx: blocks of this launch
// do, which wait for nothing (programmatic dependent launch, sm_90), and read x and g from the L2, where they still are.
// The blocks of the sums come first, because the others are many.
//
// Traffic of the memory: E (Hq + Hk) D bytes a deferred token, written; of the L2 twice that, read; and the rows.
#pragma once
#include "backward_step.cuh"
#include "sums.cuh"

struct ReduceAndFinishArguments {
  Sums sums;
  Heads q_grad, k_grad, q, k, dq, dk;
  Parameters parameters;
  Tables tables;
  long long stored;  // dx of this token and of later ones is written here
  long long tokens, sequence;
  double eps;
};
static_assert(sizeof(ReduceAndFinishArguments) == 8 * ARGUMENT_WORDS, "the host packs these arguments in another way");
static_assert(32 * WARPS == SUM_THREADS, "both kinds of blocks are of one launch");

extern "C" __global__ void __launch_bounds__(SUM_THREADS, BLOCKS)
norm_rope_reduce_and_finish(const __grid_constant__ ReduceAndFinishArguments args) {
  const unsigned adding = unsigned(args.sums.pitch) / SUM_COLUMNS;
  if (blockIdx.x < adding) {
    add_rows(args.sums, blockIdx.x);
    return;
  }
  const Lane lane;
  const unsigned warp = (blockIdx.x - adding) * WARPS + threadIdx.x / 32, flat = unsigned(args.stored) + warp / GROUPS;
  if (flat >= args.tokens) return;
  const Head head(warp % GROUPS * HEADS_PER_WARP + lane.head, lane.exists);
  Raw<Param> weight;
  if (HAS_WEIGHT) weight = load_parameter(head.weight(args.parameters), head.of_stream, lane, head.exists);
  Tile unused{};
  backward_step<false>(args, flat, head, lane, weight, head.exists, unused, unused);
}
