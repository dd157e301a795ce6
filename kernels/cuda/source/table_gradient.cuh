// Gradients of cos and sin per token, [tokens, entries], summed over all heads of q and k:
//
//   dcos_a = sum g_a n_a,   dcos_b = sum g_b n_b,   dsin_a = -sum g_a n_b,   dsin_b = sum g_b n_a
//
// n is the rotation's input (norm(x), or x where the norm comes last), g the gradient of its result. One warp takes
// one token and walks over its heads, so the order of the sums is fixed; before that, where the norm is over the whole row
// (HIDDEN), for the sums of that. Tables are rarely trained: this reads x and g once more and leaves the kernel of
// backward.cuh without these registers.
#pragma once
#include "hidden_norm.cuh"

struct TableGradientArguments {
  Heads q_grad, k_grad, q, k;
  Parameters parameters;
  Tables tables;
  Acc* dcos;
  Acc* dsin;
  long long tokens, sequence;
  double eps;
};
static_assert(sizeof(TableGradientArguments) == 8 * ARGUMENT_WORDS, "the host packs these arguments in another way");

// Over the heads that the warp holds; every thread gets the sum for its slot.
__device__ __forceinline__ void sum_over_heads(Tile& x, const Lane& lane) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      Acc a = 0, b = 0;
#pragma unroll
      for (int h = 0; h < HEADS_PER_WARP; ++h) {
        a += __shfl_sync(ALL_LANES, x.a[c][i], h * THREADS_PER_HEAD + lane.slot);
        b += __shfl_sync(ALL_LANES, x.b[c][i], h * THREADS_PER_HEAD + lane.slot);
      }
      x.a[c][i] = a;
      x.b[c][i] = b;
    }
  }
}

__device__ __forceinline__ void store_entries(Acc* row, const Tile& x, const Lane& lane, bool active) {
  const Raw<Acc> lanes = pack_tile<Acc>(WRITE, x, lane);
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int slot = lane.slot_of(c);
    const bool here = active && lane.holds(c) && rotated(slot);
    if (PER_LANE) {
      char* base = reinterpret_cast<char*>(row - ROTARY_START);
      store<sizeof(Acc)>(base + vector_lane(WRITE, slot, 0) * int(sizeof(Acc)), lanes.first[c], here);
      store<sizeof(Acc)>(base + vector_lane(WRITE, slot, 1) * int(sizeof(Acc)), lanes.second[c], here);
    } else if (here) {
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) row[pair_index(slot, i)] = x.a[c][i] + x.b[c][i];
    }
  }
}

__device__ __forceinline__ Acc warp_sum(Acc value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
  return value;
}

// HIDDEN: the norm of one stream's row, and with the norm last its gradient: r u - x projection - mean_u, with u = g w.
struct RowNorm {
  Acc mean, r, projection, mean_u;
};

__device__ __forceinline__ RowNorm row_norm(const TableGradientArguments& args, const Token& token, const Lane& lane,
                                            bool is_q) {
  RotationRaw tables;
  if (!NORM_FIRST) tables.load(args.tables, token, lane);
  const Rotation rotation(tables, lane);
  const int begin = is_q ? 0 : Q_HEADS, end = is_q ? Q_HEADS : HEADS;
  const Acc part = one_over_lanes(is_q);
  RowNorm row{};
  if (NORM == LAYER) {
    Acc total = 0;
#pragma unroll 1
    for (int first = begin; first < end; first += HEADS_PER_WARP) {
      const Head head(first + lane.head, lane.exists && first + lane.head < end);
      const auto x = load_head<IN_BYTES, In>(READ, head.at(args.q, args.k, token), lane, head.exists);
      total += sum_of(norm_input(x, rotation, lane));
    }
    row.mean = warp_sum(total) * part;
  }
  Acc squares = 0, products = 0, total = 0;
#pragma unroll 1
  for (int first = begin; first < end; first += HEADS_PER_WARP) {
    const Head head(first + lane.head, lane.exists && first + lane.head < end);
    const auto x = load_head<IN_BYTES, In>(READ, head.at(args.q, args.k, token), lane, head.exists);
    Tile z = norm_input(x, rotation, lane);
    if (NORM == LAYER) subtract(z, head.exists ? row.mean : Acc(0), lane);
    squares += sum_of(z, z);
    if (NORM_FIRST) continue;
    const char* const gradient = head.at(args.q_grad, args.k_grad, token);
    Tile u = unpack(WRITE, load_head<GRAD_BYTES, Grad>(WRITE, gradient, lane, head.exists), lane);
    if (HAS_WEIGHT) {
      const char* const weight = head.weight(args.parameters);
      multiply(u, unpack_weight(load_parameter(weight, head.of_stream, lane, head.exists), lane));
    }
    products += sum_of(u, z);
    total += sum_of(u);
  }
  row.r = reciprocal_root(warp_sum(squares) * part + Acc(args.eps));
  row.projection = warp_sum(products) * part * row.r * row.r * row.r;
  row.mean_u = NORM == LAYER ? warp_sum(total) * part * row.r : Acc(0);
  return row;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, HIDDEN && CHUNKS == 1 ? 4 : 0)
norm_rope_table_gradient(const __grid_constant__ TableGradientArguments args) {
  const unsigned flat = blockIdx.x * WARPS + threadIdx.x / 32;
  if (flat >= args.tokens) return;
  const Token token = token_at(flat, args.sequence);
  const Lane lane;
  Tile dcos{}, dsin{};
  RowNorm q_row{}, k_row{};
  if (HIDDEN) q_row = row_norm(args, token, lane, true);
  if (HIDDEN && K_HEADS > 0) k_row = row_norm(args, token, lane, false);
  for (int first = 0; first < HEADS; first += HEADS_PER_WARP) {
    const Head head(first + lane.head, lane.exists);
    const bool active = head.exists;
    Raw<Param> weight, bias;
    if (HAS_WEIGHT) weight = load_parameter(head.weight(args.parameters), head.of_stream, lane, active);
    if (HAS_BIAS) bias = load_parameter(head.bias(args.parameters), head.of_stream, lane, active);
    const char* const x = head.at(args.q, args.k, token);
    const char* const gradient = head.at(args.q_grad, args.k_grad, token);
    Tile n = unpack(READ, load_head<IN_BYTES, In>(READ, x, lane, active), lane);
    Tile g = unpack(WRITE, load_head<GRAD_BYTES, Grad>(WRITE, gradient, lane, active), lane);
    const RowNorm row{head.is_q ? q_row.mean : k_row.mean, head.is_q ? q_row.r : k_row.r,
                      head.is_q ? q_row.projection : k_row.projection, head.is_q ? q_row.mean_u : k_row.mean_u};
    if (NORMALISES && NORM_FIRST) {
      if (HIDDEN) {
        if (NORM == LAYER) subtract(n, row.mean, lane);
        scale(n, row.r);
      } else {
        standardise(n, args.eps, lane);
      }
      scale_and_shift(n, weight, bias, lane);
    } else if (NORMALISES) {
      Tile rotated_x = n;
      RotationRaw tables;
      tables.load(args.tables, token, lane);
      Rotation(tables, lane).apply(rotated_x, lane);
      if (HIDDEN) {
        if (NORM == LAYER) subtract(rotated_x, row.mean, lane);
        if (HAS_WEIGHT) multiply(g, unpack_weight(weight, lane));
        scale(g, row.r);
        add_scaled(g, rotated_x, -row.projection);
        if (NORM == LAYER) subtract(g, row.mean_u, lane);
      } else {
        norm_backward(g, rotated_x, args.eps, weight, lane, [] {});
      }
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        // A head that does not exist may hold NaN (eps = 0): it is selected away, not multiplied by zero.
        dcos.a[c][i] += active ? g.a[c][i] * n.a[c][i] : Acc(0);
        dcos.b[c][i] += active ? g.b[c][i] * n.b[c][i] : Acc(0);
        dsin.a[c][i] -= active ? g.a[c][i] * n.b[c][i] : Acc(0);
        dsin.b[c][i] += active ? g.b[c][i] * n.a[c][i] : Acc(0);
      }
    }
  }
  sum_over_heads(dcos, lane);
  sum_over_heads(dsin, lane);
  if (CONJUGATE) scale(dsin, -1);
  const bool writes = lane.exists && lane.head == 0;
  store_entries(args.dcos + (long long)(flat) * TABLE_ENTRIES, dcos, lane, writes);
  store_entries(args.dsin + (long long)(flat) * TABLE_ENTRIES, dsin, lane, writes);
}
