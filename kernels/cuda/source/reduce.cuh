// The gradients of the weights and biases, from the rows that the blocks of backward.cuh wrote.
//
// Traffic: the rows, a few hundred kilobytes that lie in the L2.
#pragma once
#include "sums.cuh"

struct ReduceArguments {
  Sums sums;
};
static_assert(sizeof(ReduceArguments) == 8 * ARGUMENT_WORDS, "the host packs these arguments in another way");

extern "C" __global__ void __launch_bounds__(SUM_THREADS, 2)
norm_rope_reduce(const __grid_constant__ ReduceArguments args) {
  add_rows(args.sums, blockIdx.x);
}
