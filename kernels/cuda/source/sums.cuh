// The second half of the weights' gradients: the rows that the blocks of backward.cuh wrote, added up.
//
// A block adds eight or sixteen columns, 16 bytes a load. The rows are few (a few hundred), so this is latency and no bandwidth: all
// loads are in flight at once, and the code is short, because it is fetched for the few microseconds that it runs.
#pragma once
#include "elements.cuh"

#if !IN_PLACE
#error "rows may be written while this kernel is resident: the read-only path (LOAD) must not be taken"
#endif

struct Sums {
  const Acc* partial;  // [rows, pitch]
  char* out[4];  // null where that gradient is not needed
  long long end[4];  // the column after the last of each output; outputs that are absent end where they begin
  long long rows, pitch;  // pitch: a multiple of 16; what is beyond end[3] means nothing
};

constexpr int SUM_COLUMNS = SUM_THREADS / 32;  // a block's

// The block-th SUM_COLUMNS columns, in an order that only the shape decides.
__device__ __forceinline__ void add_rows(const Sums& args, unsigned block) {
  constexpr int WIDTH = 16 / int(sizeof(Acc)), ACROSS = SUM_COLUMNS / WIDTH, ROWS = SUM_THREADS / ACROSS, IN_FLIGHT = 6;
  __shared__ Acc of_warps[SUM_THREADS / 32][SUM_COLUMNS];
  const int across = threadIdx.x % ACROSS, row = threadIdx.x / ACROSS;
  const Acc* here = args.partial + row * args.pitch + block * SUM_COLUMNS + across * WIDTH;
  const long long step = ROWS * args.pitch;
  wait_for_the_launch_before();  // it writes `partial`
  Acc total[WIDTH] = {};
#pragma unroll 1
  for (int left = int(args.rows) - row; left > 0; left -= ROWS * IN_FLIGHT) {
    Vector<Acc, WIDTH> parts[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      parts[i] = load<16, Acc, WIDTH>(reinterpret_cast<const char*>(here + i * step), i * ROWS < left);
    }
    here += IN_FLIGHT * step;
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) total[j] += element(parts[i], j);
    }
  }
#pragma unroll
  for (int apart = ACROSS; apart < 32; apart *= 2) {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) total[j] += __shfl_xor_sync(ALL_LANES, total[j], apart);
  }
  if (threadIdx.x % 32 < ACROSS) {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) of_warps[threadIdx.x / 32][across * WIDTH + j] = total[j];
  }
  __syncthreads();
  if (threadIdx.x >= SUM_COLUMNS) return;
  Acc sum[1] = {0};
#pragma unroll
  for (int w = 0; w < SUM_THREADS / 32; ++w) sum[0] += of_warps[w][threadIdx.x];
  const long long column = (long long)(block) * SUM_COLUMNS + threadIdx.x;
  char* out = nullptr;
  long long begin = 0, within = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (column >= begin && column < args.end[i]) {
      out = args.out[i];
      within = column - begin;
    }
    begin = args.end[i];
  }
  if (out == nullptr) return;
  Vector<Param, 1> value;
  pack(value, sum);
  store<int(sizeof(Param))>(out + within * int(sizeof(Param)), value, true);
}
