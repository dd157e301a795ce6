// Forward with a norm over the row: y = R norm(x), or norm(R x), for all heads of q and of k; v is moved.
//
// A block walks over the tokens (hidden.cuh). With a ring (STAGES) there are as many blocks as are resident, and the next
// tokens' x is on its way; without one there is a block a token.
//
// Traffic, with E the bytes of an element: 2 E (Hq + Hk) D + 2 E Hv D + 2 T bytes a token, T the bytes of its cos.
#pragma once
#include "hidden_ring.cuh"

struct HiddenForwardArguments {
  Heads q, k, v, q_out, k_out, v_out;
  Parameters parameters;
  Tables tables;
  long long blocks;  // of the heads; those after them move v
  long long tokens, sequence;
  double eps;
};
static_assert(sizeof(HiddenForwardArguments) == 8 * ARGUMENT_WORDS, "the host packs these arguments in another way");

constexpr bool WALKS_STAGED = STAGES > 0 && IN_BYTES == 16 && COPIES_TABLES;
using Ring = RowRing<1, WALKS_STAGED>;
// y = r R(x w): without a bias only r has to wait for the sum.
constexpr bool SCALES_LAST = !HAS_BIAS;
// More than 20 warps share a multiprocessor's 65536 registers: a thread has 96 or fewer, too few for weights in float, too.
constexpr bool FEW_REGISTERS = WARPS * BLOCKS > 20;

// x, the norm's input less its mean, becomes the result but for the factor r; `weight` and `bias` of its head.
__device__ __forceinline__ void weigh_and_rotate(Tile& x, Raw<Param>& weight, const Raw<Param>& bias,
                                                 const Rotation& rotation, const Lane& lane) {
  if (HAS_WEIGHT && FEW_REGISTERS) forget_unpacked(weight);
  scale_and_shift(x, weight, bias, lane);
  if (ROTATES && NORM_FIRST) rotation.apply(x, lane);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
norm_rope_hidden_forward(const __grid_constant__ HiddenForwardArguments args) {
  if (V_HEADS > 0 && blockIdx.x >= args.blocks) {
    wait_for_the_launch_before();
    move_heads<IN_BYTES, MOVE_BYTES>(args.v, args.v_out, blockIdx.x - unsigned(args.blocks), args.tokens, args.sequence);
    return;
  }
  extern __shared__ __align__(128) char slots[];
  __shared__ unsigned long long barriers[2][STAGES > 0 ? STAGES : 1];
  __shared__ alignas(16) Exchange::Sums sums;
  const Lane lane;
  const Team team;
  const Heads& source = team.is_q ? args.q : args.k;
  Ring ring(source, source, args.tables, slots, barriers, team);
  Exchange exchange(sums);
  Walk here(blockIdx.x, unsigned(args.blocks), args.sequence), ahead = here;
  wait_for_the_launch_before();
  if (WALKS_STAGED) fill_all(ring, ahead, args.tokens);
  const Places to(team.is_q ? args.q_out : args.k_out, team, lane);
  Raw<Param> weight[UNROLL], bias[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const Head head = team.head(u, lane);
    if (HAS_WEIGHT) weight[u] = load_parameter(head.weight(args.parameters), head.of_stream, lane, head.exists);
    if (HAS_BIAS) bias[u] = load_parameter(head.bias(args.parameters), head.of_stream, lane, head.exists);
  }

  for (; here.flat < args.tokens; here.advance()) {
    const Token token = here.token();
    RotationRaw tables;
    if (!(WALKS_STAGED && STAGED_TABLES) && TABLES == FIRST) tables.load(args.tables, token, lane);
    Raw<In> raw[UNROLL];
    if constexpr (WALKS_STAGED) {
      ring.wait();
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) raw[u] = ring.take<In>(0, u, READ, team, lane);
      if constexpr (STAGED_TABLES) ring.take_tables(tables, lane);
    } else {
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        raw[u] = load_row<IN_BYTES, In>(READ, source, u, token, team, lane);
      }
    }
    if (!(WALKS_STAGED && STAGED_TABLES) && TABLES != FIRST) tables.load(args.tables, token, lane);
    const Rotation rotation(tables, lane);

    Tile y[UNROLL];
    Acc mean = 0;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) y[u] = norm_input(raw[u], rotation, lane);
    if (NORM == LAYER) {
      Acc total[1] = {0};
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) total[0] += sum_of(y[u]);
      exchange.add_up(total, team);
      mean = total[0] * one_over_lanes(team.is_q);
    }
    Acc squares[1] = {0};
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (NORM == LAYER) subtract(y[u], team.exists(u, lane) ? mean : Acc(0), lane);
      squares[0] += sum_of(y[u], y[u]);
      if (SCALES_LAST) weigh_and_rotate(y[u], weight[u], bias[u], rotation, lane);
    }
    exchange.add_up(squares, team);
    if (WALKS_STAGED) {
      if (ring.copies) bulk::fence();
      if (ahead.flat < args.tokens) ring.fill(ring.stage, ahead.token());
      ahead.advance();
      ring.advance();
    }
    const Acc r = reciprocal_root(squares[0] * one_over_lanes(team.is_q) + Acc(args.eps));

#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      scale(y[u], r);
      if (!SCALES_LAST) weigh_and_rotate(y[u], weight[u], bias[u], rotation, lane);
      char* const out = to.at(token, u, team, lane);
      store_head<OUT_BYTES>(WRITE, out, lane, pack_tile<Out>(WRITE, y[u], lane), team.exists(u, lane));
    }
  }
}
