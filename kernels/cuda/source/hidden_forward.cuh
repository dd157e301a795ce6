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

constexpr bool WALKS_STAGED = STAGES > 0 && IN_BYTES == 16;  // an address may not be what a bulk copy takes

// With a ring tables come where they are needed; without one early.
constexpr bool EARLY = !WALKS_STAGED && TABLES == FIRST;

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
norm_rope_hidden_forward(const __grid_constant__ HiddenForwardArguments args) {
  wait_for_the_launch_before();
  if (V_HEADS > 0 && blockIdx.x >= args.blocks) {
    move_heads<IN_BYTES, MOVE_BYTES>(args.v, args.v_out, blockIdx.x - unsigned(args.blocks), args.tokens, args.sequence);
    return;
  }
  extern __shared__ __align__(128) char slots[];
  __shared__ unsigned long long barriers[STAGES > 0 ? WARPS * STAGES : 1];
  __shared__ alignas(16) Acc of_warps[2][WARPS][SUMS_AT_ONCE];
  const Lane lane;
  const Team team;
  Exchange exchange{of_warps, 0};
  Walk here(blockIdx.x, unsigned(args.blocks), args.sequence), ahead = here;

  const Heads& source = team.is_q ? args.q : args.k;
  using Ring = RowRing<1, WALKS_STAGED>;
  Ring ring(source, source, slots, barriers, team);
  if (WALKS_STAGED) {
#pragma unroll
    for (int s = 0; s < STAGES; ++s, ahead.advance()) {
      if (ahead.flat < args.tokens) ring.fill(s, ahead.token());
    }
  }
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
    if (EARLY) tables.load(args.tables, token, lane);
    if (WALKS_STAGED) ring.wait();
    const auto load_x = [&](int u) {
      const Head head = team.head(u, lane);
      return WALKS_STAGED ? ring.template take<In>(0, u, READ, lane, head.exists)
                          : load_head<IN_BYTES, In>(READ, head.at(args.q, args.k, token), lane, head.exists);
    };
    const auto done = [&] {
      if (!WALKS_STAGED) return;
      ring.refill(ahead.flat < args.tokens, ahead.token());
      ahead.advance();
    };
    Raw<In> kept;
    if (!SEVERAL) {
      kept = load_x(0);
      done();
    }
    if (!EARLY && !NORM_FIRST) tables.load(args.tables, token, lane);
    const auto input = [&](int u, Acc mean) {
      return norm_input(SEVERAL ? load_x(u) : kept, tables, mean, lane, team.head(u, lane).exists);
    };

    Acc mean = 0;
    if (NORM == LAYER) {
      Acc total[1] = {0};
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) total[0] += sum_of(input(u, 0));
      exchange.add_up(total, team);
      mean = total[0] * one_over_lanes(team.is_q);
    }
    Acc squares[1] = {0};
    Tile y;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      y = input(u, mean);
      squares[0] += sum_of(y, y);
    }
    if (!EARLY && NORM_FIRST) tables.load(args.tables, token, lane);  // on their way during the exchange
    exchange.add_up(squares, team);
    const Acc r = reciprocal_root(squares[0] * one_over_lanes(team.is_q) + Acc(args.eps));

#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const Head head = team.head(u, lane);
      if (SEVERAL) y = input(u, mean);
      if (HAS_WEIGHT) forget_unpacked(weight[u]);
      scale(y, r);
      scale_and_shift(y, weight[u], bias[u], lane);
      if (ROTATES && NORM_FIRST) Rotation(tables, lane).apply(y, lane);
      char* const out = head.at(args.q_out, args.k_out, token);
      store_head<OUT_BYTES>(WRITE, out, lane, pack_tile<Out>(WRITE, y, lane), head.exists);
    }
    if (SEVERAL) done();
  }
}
