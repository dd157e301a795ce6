// Backward of hidden_forward.cuh, given g, the gradient of the result. With xhat and r of the whole row:
//
//   norm first:  n = R' g,   dw = sum n xhat,   db = sum n,   dx = norm'(n w)
//   norm last:   z = R x,    dw = sum g xhat,   db = sum g,   dx = R' norm'(g w),     xhat of z
//
// The norm is recomputed from x. Both of its sums, of x^2 and of g w x, need no r: one exchange a token (LayerNorm: two). A
// thread has the same lanes of every token, so dw and db are sums of its own; each block writes them as one row of
// `partial`, which sums.cuh adds up. The grid decides the order, and is the same from run to run: so are the bits.
//
// Traffic, with E the bytes of an element: 3 E (Hq + Hk) D + 2 E Hv D + 2 T bytes a token, T the bytes of its cos; and
// 4 (Hq + Hk) D bytes a block, written and read again.
#pragma once
#include "hidden_ring.cuh"
#include "partial.cuh"

struct HiddenBackwardArguments {
  Heads q_grad, k_grad, v_grad, q, k, dq, dk, dv;
  Parameters parameters;
  Tables tables;
  Acc* partial;  // [blocks, PITCH]
  long long blocks;  // of the heads; those after them move v
  long long tokens, sequence;
  double eps;
};
static_assert(sizeof(HiddenBackwardArguments) == 8 * ARGUMENT_WORDS, "the host packs these arguments in another way");

constexpr bool WALKS_STAGED = STAGES > 0 && IN_BYTES == 16 && GRAD_BYTES == 16 && COPIES_TABLES;
using Ring = RowRing<2, WALKS_STAGED>;
// A thread's sums for one head of a row of `partial`.
__device__ __forceinline__ void store_sums(Acc* row, int head, const Tile& sum, const Lane& lane, bool exists) {
  constexpr int BYTES = PAIRS * int(sizeof(Acc)) < 16 ? PAIRS * int(sizeof(Acc)) : 16;
  char* const target = reinterpret_cast<char*>(row + head * HEAD_DIM);
  store_head<BYTES>(NORM_SIDE, target, lane, pack_tile<Acc>(NORM_SIDE, sum, lane), exists);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
norm_rope_hidden_backward(const __grid_constant__ HiddenBackwardArguments args) {
  if (V_HEADS > 0 && blockIdx.x >= args.blocks) {
    wait_for_the_launch_before();
    move_heads<IN_BYTES, DX_BYTES>(args.v_grad, args.dv, blockIdx.x - unsigned(args.blocks), args.tokens, args.sequence);
    return;
  }
  extern __shared__ __align__(128) char slots[];
  __shared__ unsigned long long barriers[2][STAGES > 0 ? STAGES : 1];
  __shared__ alignas(16) Exchange::Sums exchanged;
  const Lane lane;
  const Team team;
  const Heads &x_heads = team.is_q ? args.q : args.k, &g_heads = team.is_q ? args.q_grad : args.k_grad;
  Ring ring(x_heads, g_heads, args.tables, slots, barriers, team);
  Exchange exchange(exchanged);
  Walk here(blockIdx.x, unsigned(args.blocks), args.sequence), ahead = here;
  wait_for_the_launch_before();
  if (SUMS > 0) let_the_next_launch_begin();  // that of the sums, which waits for the end before it reads
  if (WALKS_STAGED) fill_all(ring, ahead, args.tokens);
  const Places to(team.is_q ? args.dq : args.dk, team, lane);
  const bool stores = to.heads.base != nullptr;
  Raw<Param> weight[UNROLL];
  Tile dweight[UNROLL], dbias[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const Head head = team.head(u, lane);
    if (HAS_WEIGHT) weight[u] = load_parameter(head.weight(args.parameters), head.of_stream, lane, head.exists);
    dweight[u] = dbias[u] = Tile{};
  }
  const auto weight_of = [&](int u) {
    if (WALKS_STAGED || UNROLL <= 2) return unpack_weight(weight[u], lane);
    // Without a ring there are no registers for the weights of so many slots.
    const Head head = team.head(u, lane);
    return unpack_weight(load_parameter(head.weight(args.parameters), head.of_stream, lane, head.exists), lane);
  };

  for (bool first = true; here.flat < args.tokens; here.advance(), first = false) {
    const Token token = here.token();
    RotationRaw tables;
    if (!(WALKS_STAGED && STAGED_TABLES) && TABLES == FIRST) tables.load(args.tables, token, lane);
    if (WALKS_STAGED) ring.wait();
    const auto load_x = [&](int u) {
      if constexpr (WALKS_STAGED) return ring.take<In>(0, u, READ, team, lane);
      else return load_row<IN_BYTES, In>(READ, x_heads, u, token, team, lane);
    };
    const auto load_g = [&](int u) {
      if constexpr (WALKS_STAGED) return ring.take<Grad>(1, u, WRITE, team, lane);
      else return load_row<GRAD_BYTES, Grad>(WRITE, g_heads, u, token, team, lane);
    };
    // A single slot is kept; several are read again behind the sums.
    Raw<In> kept_x;
    Raw<Grad> kept_g;
    if (!SEVERAL) {
      kept_x = load_x(0);
      kept_g = load_g(0);
    }
    if constexpr (WALKS_STAGED && STAGED_TABLES) ring.take_tables(tables, lane);
    else if (TABLES != FIRST) tables.load(args.tables, token, lane);

    const Acc part = one_over_lanes(team.is_q);
    Acc mean = 0;
    const auto input = [&](int u) {
      Tile x = norm_input(SEVERAL ? load_x(u) : kept_x, Rotation(tables, lane), lane);
      if (NORM == LAYER) subtract(x, team.exists(u, lane) ? mean : Acc(0), lane);
      return x;
    };
    // g becomes the gradient of the norm's result.
    const auto gradient = [&](int u) {
      Tile g = unpack(WRITE, SEVERAL ? load_g(u) : kept_g, lane);
      if (ROTATES && NORM_FIRST) Rotation(tables, lane).apply_transposed(g, lane);
      return g;
    };
    if (NORM == LAYER) {
      Acc total[1] = {0};
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) total[0] += sum_of(input(u));
      exchange.add_up(total, team);
      mean = total[0] * part;
    }
    Acc sums[SUMS_AT_ONCE] = {};
    Tile x, g;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      x = input(u);
      g = gradient(u);
      Tile scaled = g;
      if (HAS_WEIGHT) multiply(scaled, weight_of(u));
      sums[0] += sum_of(x, x);
      sums[1] += sum_of(scaled, x);
      if constexpr (NORM == LAYER) sums[2] += sum_of(scaled);
    }
    exchange.add_up(sums, team);
    if (WALKS_STAGED) {
      // Everyone has what the slot held; several slots a thread are read once more, so that only the one before is free.
      if (ring.copies) bulk::fence();
      const bool more = ahead.flat < args.tokens && !(SEVERAL && first);
      if (more) ring.fill(SEVERAL ? (ring.stage > 0 ? ring.stage : STAGES) - 1 : ring.stage, ahead.token());
      if (!(SEVERAL && first)) ahead.advance();
    }
    // dx = r u - x r^3 mean(u x), with u = g w; LayerNorm: that less r mean(u).
    const Acc r = reciprocal_root(sums[0] * part + Acc(args.eps)), projection = sums[1] * part * r * r * r;
    Acc mean_u = 0;
    if constexpr (NORM == LAYER) mean_u = sums[2] * part * r;

#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (ROTATES && (SEVERAL || !NORM_FIRST)) {
        forget_unpacked(tables.cos);
        forget_unpacked(tables.sin);
      }
      if (SEVERAL) {
        x = input(u);
        g = gradient(u);
      }
      if (NEEDS_BIAS) add(dbias[u], g);
      scale(g, r);
      if (NEEDS_WEIGHT) add_products(dweight[u], g, x);
      if (HAS_WEIGHT) multiply(g, weight_of(u));
      add_scaled(g, x, -projection);
      if (NORM == LAYER) subtract(g, mean_u, lane);
      if (ROTATES && !NORM_FIRST) Rotation(tables, lane).apply_transposed(g, lane);
      char* const out = to.at(token, u, team, lane);
      store_head<DX_BYTES>(READ, out, lane, pack_tile<In>(READ, g, lane), stores && team.exists(u, lane));
    }
    if (WALKS_STAGED) ring.advance();
  }

  if (SUMS > 0) {
    Acc* const row = args.partial + (long long)(blockIdx.x) * PITCH + (team.is_q ? 0 : SUMS * Q_COLUMNS);
    const int columns = team.is_q ? Q_COLUMNS : K_COLUMNS;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const Head head = team.head(u, lane);
      if (NEEDS_WEIGHT) store_sums(row, head.of_stream, dweight[u], lane, head.exists);
      if (NEEDS_BIAS) store_sums(row + int(NEEDS_WEIGHT) * columns, head.of_stream, dbias[u], lane, head.exists);
    }
  }
}
