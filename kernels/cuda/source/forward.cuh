// Forward: y = R norm(x), or norm(R x), for every head of q and k; v is moved.
// TRANSPOSED: the backward where there is no norm. x is the gradient of the result and y = R' x that of the input.
//
// One warp takes HEADS_PER_WARP x UNROLL heads of one token: it issues all its loads, then computes and stores. The
// grid covers all tokens once, head groups fastest, so that neighbouring warps share the token's tables in the cache.
//
// Where the card's memory is fast, a warp also asks for what the warps of a later token will load (PREFETCHES_HEADS,
// PREFETCHES_TABLES): more bytes on their way than the registers of the resident warps have room for.
//
// Traffic, with E the bytes of an element: 2 E (Hq + Hk) D + 2 E Hv D + 2 T bytes a token, T the bytes of its cos.
#pragma once
#include "norm.cuh"
#include "streams.cuh"

struct ForwardArguments {
  Heads q, k, v, q_out, k_out, v_out;
  Parameters parameters;
  Tables tables;
  long long blocks;  // of the heads; those after them move v
  long long ahead;  // how many tokens later
  long long tokens, sequence;
  double eps;
};
static_assert(sizeof(ForwardArguments) == 8 * ARGUMENT_WORDS, "the host packs these arguments in another way");

constexpr Side FROM = TRANSPOSED ? WRITE : READ, TO = TRANSPOSED ? READ : WRITE;
static_assert(!TRANSPOSED || !NORMALISES, "the gradient of a norm is backward.cuh's");
constexpr int HEADS_AT_ONCE = HEADS_PER_WARP * UNROLL;
constexpr bool ONE_WEIGHT = !PER_HEAD && Q_HEADS % HEADS_AT_ONCE == 0;  // a warp's heads are all q's, or all k's
constexpr int GROUPS = (HEADS + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE;

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
norm_rope_forward(const __grid_constant__ ForwardArguments args) {
  wait_for_the_launch_before();
  if (V_HEADS > 0 && blockIdx.x >= args.blocks) {
    move_heads<IN_BYTES, MOVE_BYTES>(args.v, args.v_out, blockIdx.x - unsigned(args.blocks), args.tokens, args.sequence);
    return;
  }
  const unsigned warp = blockIdx.x * WARPS + threadIdx.x / 32;
  const unsigned flat = warp / GROUPS;
  if (flat >= args.tokens) return;
  const Token token = token_at(flat, args.sequence);
  const Lane lane;
  const int first_head = warp % GROUPS * HEADS_AT_ONCE + lane.head;

  RotationRaw tables;
  if (TABLES == FIRST) tables.load(args.tables, token, lane);
  Raw<In> x[UNROLL];
  Raw<Param> weight[UNROLL], bias[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const Head head(first_head + u * HEADS_PER_WARP, lane.exists);
    x[u] = load_head<IN_BYTES, In>(FROM, head.at(args.q, args.k, token), lane, head.exists);
  }
  if (TABLES != FIRST) tables.load(args.tables, token, lane);
  if ((PREFETCHES_HEADS || PREFETCHES_TABLES) && flat + args.ahead < args.tokens) {
    const Token later = token_at(unsigned(flat + args.ahead), args.sequence);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const Head head(first_head + u * HEADS_PER_WARP, lane.exists);
      constexpr int LINE = 128, LINES = (HEAD_DIM * int(sizeof(In)) + LINE - 1) / LINE;
      if (PREFETCHES_HEADS && head.exists && lane.slot < LINES) {
        prefetch(head.at(args.q, args.k, later) + lane.slot * LINE);
      }
    }
    if (PREFETCHES_TABLES && warp % GROUPS == 0 && lane.head == 0 && rotated(lane.slot)) {
      RotationRaw::prefetch_rows(args.tables, later, lane);
    }
  }
  const Rotation rotation(tables, lane);
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const Head head(first_head + u * HEADS_PER_WARP, lane.exists);
    if (ONE_WEIGHT && u > 0) break;
    if (HAS_WEIGHT) weight[u] = load_parameter(head.weight(args.parameters), head.of_stream, lane, head.exists);
    if (HAS_BIAS) bias[u] = load_parameter(head.bias(args.parameters), head.of_stream, lane, head.exists);
  }
  if (IN_PLACE) __syncwarp();  // a lane that one thread reads another may write

#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const Head head(first_head + u * HEADS_PER_WARP, lane.exists);
    Tile y = unpack(FROM, x[u], lane);
    if (TRANSPOSED && ROTATES) rotation.apply_transposed(y, lane);
    if (!TRANSPOSED && ROTATES && !NORM_FIRST) rotation.apply(y, lane);
    if (NORMALISES) {
      standardise(y, args.eps, lane);
      scale_and_shift(y, weight[ONE_WEIGHT ? 0 : u], bias[ONE_WEIGHT ? 0 : u], lane);
    }
    if (!TRANSPOSED && ROTATES && NORM_FIRST) rotation.apply(y, lane);
    char* const out = head.at(args.q_out, args.k_out, token);
    store_head<OUT_BYTES>(TO, out, lane, pack_tile<Out>(TO, y, lane), head.exists);
  }
}
