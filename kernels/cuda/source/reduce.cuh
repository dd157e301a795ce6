// Adds up the rows of `partial` [rows, columns], in an order that only the shape decides, into up to four gradients.
//
// A block takes 8 columns (one 32-byte sector a row, float) and walks over the rows with 32 threads a column, each with
// 16 loads in flight: the rows are few, so this kernel is latency.
#pragma once
#include "elements.cuh"

struct ReduceArguments {
  const Acc* partial;
  char* out[4];  // null where that gradient is not needed
  long long end[4];  // the column after the last of each output; outputs that are absent end where they begin
  long long rows, columns;
};
static_assert(sizeof(ReduceArguments) == 8 * ARGUMENT_WORDS, "the host packs these arguments in another way");

constexpr int REDUCE_COLUMNS = 8, REDUCE_ROWS = 32, IN_FLIGHT = 16;

extern "C" __global__ void __launch_bounds__(REDUCE_COLUMNS * REDUCE_ROWS)
norm_rope_reduce(const __grid_constant__ ReduceArguments args) {
  __shared__ Acc sums[REDUCE_ROWS][REDUCE_COLUMNS];
  const int x = threadIdx.x % REDUCE_COLUMNS, y = threadIdx.x / REDUCE_COLUMNS;
  const long long column = (long long)(blockIdx.x) * REDUCE_COLUMNS + x;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");  // for the end of the kernel that writes `partial`
#endif
  Acc total = 0;
  if (column < args.columns) {
    for (long long first = y; first < args.rows; first += REDUCE_ROWS * IN_FLIGHT) {
      Acc values[IN_FLIGHT];
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) {
        const long long row = first + i * REDUCE_ROWS;
        values[i] = row < args.rows ? args.partial[row * args.columns + column] : Acc(0);
      }
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) total += values[i];
    }
  }
  sums[y][x] = total;
  __syncthreads();
#pragma unroll
  for (int step = REDUCE_ROWS / 2; step > 0; step /= 2) {
    if (y < step) sums[y][x] += sums[y + step][x];
    __syncthreads();
  }
  if (y > 0 || column >= args.columns) return;
  long long begin = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (column >= begin && column < args.end[i] && args.out[i] != nullptr) {
      Vector<Param, 1> value;
      const Acc one[1] = {sums[0][x]};
      pack(value, one);
      store<int(sizeof(Param))>(args.out[i] + (column - begin) * int(sizeof(Param)), value, true);
    }
    begin = args.end[i];
  }
}
