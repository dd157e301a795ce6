// Adds up the rows of `partial` [rows, columns], in an order that only the shape decides, into up to four gradients.
//
// A block takes 8 columns (one 32-byte sector a row, float) and walks over the rows with 32 threads a column.
#pragma once
#include "elements.cuh"

struct ReduceArguments {
  const Acc* partial;
  char* out[4];  // null where that gradient is not needed
  long long end[4];  // the column after the last of each output; outputs that are absent end where they begin
  long long rows, columns;
};

constexpr int REDUCE_COLUMNS = 8, REDUCE_ROWS = 32;

extern "C" __global__ void __launch_bounds__(REDUCE_COLUMNS * REDUCE_ROWS)
norm_rope_reduce(const __grid_constant__ ReduceArguments args) {
  __shared__ Acc sums[REDUCE_ROWS][REDUCE_COLUMNS];
  const int x = threadIdx.x % REDUCE_COLUMNS, y = threadIdx.x / REDUCE_COLUMNS;
  const long long column = (long long)(blockIdx.x) * REDUCE_COLUMNS + x;
  Acc total = 0;
  if (column < args.columns) {
#pragma unroll 4
    for (long long row = y; row < args.rows; row += REDUCE_ROWS) total += args.partial[row * args.columns + column];
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
