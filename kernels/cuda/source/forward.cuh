// Forward: y = R norm(x), or norm(R x), for every head of q and k; v is moved.
// TRANSPOSED: the backward where there is no norm. x is the gradient of the result and y = R' x that of the input.
//
// One warp takes HEADS_PER_WARP x UNROLL heads, of one token or (FLAT) of two: it issues all its loads, then computes and
// stores. The grid covers all tokens once, heads fastest, so that neighbouring warps share the token's tables in the cache.
//
// Where the card's memory is fast, a warp also asks for what the warps of a later token will load (PREFETCHES_HEADS,
// PREFETCHES_TABLES): more bytes on their way than the registers of the resident warps have room for.
//
// Traffic, with E the bytes of an element: 2 E (Hq + Hk) D + 2 E Hv D + 2 T bytes a token, T the bytes of its cos.
#pragma once
#include "handed.cuh"
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
static_assert(!FLAT || UNROLL == 1, "a warp's heads are of two tokens at most");
constexpr int GROUPS = (HEADS + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE;

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
norm_rope_forward(const __grid_constant__ ForwardArguments args) {
  wait_for_the_launch_before();
  if (V_HEADS > 0 && blockIdx.x >= args.blocks) {
    move_heads<IN_BYTES, MOVE_BYTES>(args.v, args.v_out, blockIdx.x - unsigned(args.blocks), args.tokens, args.sequence);
    return;
  }
  const unsigned warp = blockIdx.x * WARPS + threadIdx.x / 32;
  const Lane lane;
  // FLAT: the heads of all tokens follow each other, and a warp's may be of two tokens. Else they are of one, and the last
  // warp of a token has fewer.
  const unsigned begin = warp * HEADS_AT_ONCE, last = begin + HEADS_AT_ONCE - 1;
  const unsigned flat_of_warp = FLAT ? begin / HEADS : warp / GROUPS;
  if (flat_of_warp >= args.tokens) return;
  const unsigned index = begin + lane.head;
  const bool exists = lane.exists && (!FLAT || index / HEADS < args.tokens);
  const unsigned flat = FLAT && exists ? index / HEADS : flat_of_warp;
  const int first_head = FLAT ? int(index % HEADS) : int(warp % GROUPS) * HEADS_AT_ONCE + lane.head;
  const Token token = token_at(flat, args.sequence);

  RotationRaw tables;
  if (TABLES == FIRST) tables.load(args.tables, token, lane);
  // Addresses first: computed between the loads, by branches of q and k, they moved the last of these behind what waits
  // for the first.
  const char* from[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) from[u] = Head(first_head + u * HEADS_PER_WARP, exists).at(args.q, args.k, token);
  Raw<In> x[UNROLL];
  Raw<Param> weight[UNROLL], bias[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const Head head(first_head + u * HEADS_PER_WARP, exists);
    x[u] = load_head<IN_BYTES, In>(FROM, from[u], lane, head.exists);
  }
  if (TABLES == LAST) tables.load(args.tables, token, lane);
  Handed handed;
  const bool two_tokens = FLAT && last / HEADS > flat_of_warp && flat_of_warp + 1 < args.tokens;
  if (HANDS_TABLES) {
    handed.load(0, args.tables, token_at(flat_of_warp, args.sequence), true);
    if (FLAT) handed.load(Handed::TOKENS - 1, args.tables, token_at(flat_of_warp + two_tokens, args.sequence), two_tokens);
  }
  if ((PREFETCHES_HEADS || PREFETCHES_TABLES) && flat + args.ahead < args.tokens) {
    const Token later = token_at(unsigned(flat + args.ahead), args.sequence);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const Head head(first_head + u * HEADS_PER_WARP, exists);
      constexpr int LINE = 128, LINES = (HEAD_DIM * int(sizeof(In)) + LINE - 1) / LINE;
      if (PREFETCHES_HEADS && head.exists && lane.slot < LINES) {
        prefetch(head.at(args.q, args.k, later) + lane.slot * LINE);
      }
    }
    if (PREFETCHES_TABLES && first_head == 0 && exists && rotated(lane.slot)) {
      RotationRaw::prefetch_rows(args.tables, later, lane);
    }
  }
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const Head head(first_head + u * HEADS_PER_WARP, exists);
    if (ONE_WEIGHT && u > 0) break;
    if (HAS_WEIGHT) weight[u] = load_parameter(head.weight(args.parameters), head.of_stream, lane, head.exists);
    if (HAS_BIAS) bias[u] = load_parameter(head.bias(args.parameters), head.of_stream, lane, head.exists);
  }
  if constexpr (HANDS_TABLES) {
    __shared__ alignas(16) char rows[WARPS * Handed::BYTES];
    const unsigned memory = bulk::shared_address(rows) + threadIdx.x / 32 * Handed::BYTES;
    handed.put(0, memory, true);
    if (FLAT) handed.put(Handed::TOKENS - 1, memory, two_tokens);
    __syncwarp();
    Handed::take(tables, memory + (FLAT ? (flat - flat_of_warp) * Handed::ROWS : 0), lane);
  }
  const Rotation rotation(tables, lane);
  if (IN_PLACE) __syncwarp();  // a lane that one thread reads another may write

#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const Head head(first_head + u * HEADS_PER_WARP, exists);
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
