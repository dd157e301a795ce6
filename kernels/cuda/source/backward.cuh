// Backward, given g, the gradient of the result (the formulas stand in kernels/reference.py):
//
//   norm first:  n = R' g,   xhat = x r(x),      dw = sum n xhat,   db = sum n,   dx = norm'(n w)
//   norm last:   z = R x,    xhat = z r(z),      dw = sum g xhat,   db = sum g,   dx = R' norm'(g w)
//
// The norm is recomputed from x, which is read anyway; nothing else was saved. A warp keeps one group of heads and walks
// over the tokens, so the sums of dw and db stay in its registers; at the end a block adds its warps' sums in a fixed order
// and writes one row of `partial`, which sums.cuh adds up. The grid decides the order, and is the same from run to run: so
// are the bits. v's share of the gradient is only moved: beside the sums where there are some (reduce_and_move.cuh), else
// by blocks of this launch. Without v the last tokens' dx may be written beside the sums (reduce_and_finish.cuh).
// Where the card's memory is fast (STAGES), the next tokens' x and g are on their way meanwhile (ring.cuh).
//
// Traffic, with E the bytes of an element: 3 E (Hq + Hk) D + 2 E Hv D + 2 T bytes a token, T the bytes of its cos
// (2 E (Hq + Hk) D where there is no norm: x is not read).
#pragma once
#include "backward_step.cuh"
#include "partial.cuh"
#include "ring.cuh"

struct BackwardArguments {
  Heads q_grad, k_grad, v_grad, q, k, dq, dk, dv;
  Parameters parameters;
  Tables tables;
  Acc* partial;  // [blocks, PITCH]; with one row a head in the parameters [slices, PITCH]
  long long blocks;  // of the heads; those after them move v
  long long stored;  // DEFERS: dx of this token and of later ones is left to reduce_and_finish.cuh
  long long tokens, sequence;
  double eps;
};
static_assert(sizeof(BackwardArguments) == 8 * ARGUMENT_WORDS, "the host packs these arguments in another way");

// Where a lane of the parameters' order lies: the i-th pair of a slot, its first or second member.
struct Holder {
  int slot, member, i;

  __device__ explicit Holder(int lane) {
    const int within = lane % PAIRS;
    int which;  // of the slot's two vectors
    if (lane >= ROTARY_START && lane < ROTARY_START + ROTARY_DIM) {
      const int vector = (lane - ROTARY_START) / PAIRS;
      constexpr int SLOTS_HERE = ROTATED_SLOTS > 0 ? ROTATED_SLOTS : 1;
      which = neighbours(NORM_SIDE) ? vector % 2 : vector / SLOTS_HERE;
      slot = neighbours(NORM_SIDE) ? vector / 2 : vector % SLOTS_HERE;
    } else {
      const int vector = (lane < ROTARY_START ? lane : lane - ROTARY_DIM) / PAIRS;
      constexpr int SLOTS_HERE = PASSING_SLOTS > 0 ? PASSING_SLOTS : 1;
      which = vector / SLOTS_HERE;
      slot = ROTATED_SLOTS + vector % SLOTS_HERE;
    }
    const bool apart = taken_apart(NORM_SIDE, slot);
    member = apart ? within % 2 : which;
    i = apart ? (which * PAIRS + within) / 2 : within;
    if (PAIRS == 1) member = which;
  }
};

// With one row a head: writes a thread's lanes of a row of HEAD_DIM sums, in the parameter's order.
__device__ __forceinline__ void scatter(Acc* row, const Tile& sum, const Lane& lane, bool active) {
  if (!active) return;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int slot = lane.slot_of(c);
    if (!lane.holds(c)) continue;
    const int first = vector_lane(NORM_SIDE, slot, 0), second = vector_lane(NORM_SIDE, slot, 1);
    const bool apart = taken_apart(NORM_SIDE, slot);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const int even = 2 * i, odd = 2 * i + 1;
      row[apart ? (even < PAIRS ? first + even : second + even - PAIRS) : first + i] = sum.a[c][i];
      row[apart ? (odd < PAIRS ? first + odd : second + odd - PAIRS) : second + i] = sum.b[c][i];
    }
  }
}

// The block's row of sums of one kind (0 = the first that is needed): over its warps and their heads, in their order.
//
// In shared memory each of a thread's sums has a line of its own, [warp, chunk, member, i][thread]: no two threads of a
// warp write to one bank. The lines are a little apart, so that neighbouring lanes are read from different banks too.
constexpr int LINE = 32 + (PAIRS > 1 ? 32 / PAIRS : 0), LINES = CHUNKS * 2 * PAIRS;

__device__ void block_sums(Acc* lines, Acc* partial, int kind, const Tile& sum, const Lane& lane) {
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      Acc* const line = lines + (warp * LINES + c * 2 * PAIRS + i) * LINE + threadIdx.x % 32;
      line[0] = sum.a[c][i];
      line[PAIRS * LINE] = sum.b[c][i];
    }
  }
  __syncthreads();
  constexpr int STREAMS = K_HEADS > 0 ? 2 : 1;
  for (int column = threadIdx.x; column < STREAMS * HEAD_DIM; column += 32 * WARPS) {
    const int stream = column / HEAD_DIM, parameter_lane = column % HEAD_DIM;
    const Holder holder(parameter_lane);
    const int chunk = holder.slot / THREADS_PER_HEAD;
    const Acc* held =
        lines + (chunk * 2 * PAIRS + holder.member * PAIRS + holder.i) * LINE + holder.slot % THREADS_PER_HEAD;
    const int begin = stream == 0 ? 0 : Q_HEADS, end = stream == 0 ? Q_HEADS : HEADS;
    int first_head = blockIdx.x * WARPS % GROUPS * HEADS_PER_WARP;
    Acc total = 0;
    // Not unrolled: this runs once, and its code is fetched for that.
#pragma unroll 1
    for (int w = 0; w < WARPS; ++w, held += LINES * LINE) {
      if (first_head < end && first_head + HEADS_PER_WARP > begin) {
#pragma unroll
        for (int h = 0; h < HEADS_PER_WARP; ++h) {
          const int head = first_head + h;
          // A selection, not a branch: all of these loads are in flight at once.
          const Acc value = held[h * THREADS_PER_HEAD];
          total += head >= begin && head < end ? value : Acc(0);
        }
      }
      first_head = first_head + HEADS_PER_WARP < GROUPS * HEADS_PER_WARP ? first_head + HEADS_PER_WARP : 0;
    }
    partial[(long long)(blockIdx.x) * PITCH + stream * SUMS * HEAD_DIM + kind * HEAD_DIM + parameter_lane] = total;
  }
  __syncthreads();
}

// The tokens of one warp, by way of the ring.
__device__ __forceinline__ void walk_staged(const BackwardArguments& args, const char* memory,
                                            const unsigned long long* barriers, unsigned slice, unsigned slices,
                                            int first_head, const Head& head, const Lane& lane, bool stores,
                                            Tile& dweight, Tile& dbias) {
  Ring ring(args, memory, barriers, first_head);
  const Place out(head.is_q ? args.dq : args.dk, head.of_stream, head.is_q);
  Walk here(slice, slices, args.sequence), ahead = here;
  fill_all(ring, ahead, args.tokens);
  RotationRaw tables;
  if (TABLES == AHEAD && here.flat < args.tokens) tables.load(args.tables, here.token(), lane);
  Raw<Param> weight;
  if (HAS_WEIGHT) weight = load_parameter(head.weight(args.parameters), head.of_stream, lane, head.exists);
  while (here.flat < args.tokens) {
    if (TABLES != AHEAD && !STAGED_TABLES) tables.load(args.tables, here.token(), lane);
    ring.wait();
    const Raw<In> x = ring.x(lane, head.exists);
    const Raw<Grad> g = ring.g(lane, head.exists);
    if (STAGED_TABLES) ring.tables(tables, lane);
    const auto refill = [&] {
      ring.taken();
      if (ahead.flat < args.tokens) ring.fill(ring.stage, ahead.token());
      ahead.advance();
      ring.advance();
    };
    // Where no load is on its way the fence has least to wait for behind the rotation; elsewhere the delay costs more.
    constexpr bool LATER = STAGED_TABLES && NORM_FIRST;
    if (!LATER) refill();
    char* const target = out.at(here.token());
    const bool stored = stores && (!DEFERS || here.flat < args.stored);
    here.advance();
    backward_head<true>(x, g, tables, weight, args.eps, target, stored, lane, dweight, dbias, [&] {
      if (LATER) refill();
      if (TABLES == AHEAD && here.flat < args.tokens) tables.load(args.tables, here.token(), lane);
    });
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
norm_rope_backward(const __grid_constant__ BackwardArguments args) {
  wait_for_the_launch_before();
  if (SUMS > 0) let_the_next_launch_begin();  // that of the sums, which waits for the end before it reads
  if (V_HEADS > 0 && blockIdx.x >= args.blocks) {
    move_heads<IN_BYTES, DX_BYTES>(args.v_grad, args.dv, blockIdx.x - unsigned(args.blocks), args.tokens, args.sequence);
    return;
  }
  // The ring, and then the lines of the sums.
  constexpr int RING_BYTES = WALKS_STAGED ? WARPS * Ring::WARP : 0;
  constexpr int LINES_BYTES = SUMS > 0 && !PER_HEAD ? WARPS * LINES * LINE * int(sizeof(Acc)) : 0;
  constexpr int SHARED_BYTES = RING_BYTES > LINES_BYTES ? RING_BYTES : LINES_BYTES;
  __shared__ alignas(128) char shared[SHARED_BYTES > 0 ? SHARED_BYTES : 1];
  const Lane lane;
  const unsigned warp = blockIdx.x * WARPS + threadIdx.x / 32;
  // The host makes the number of warps a multiple of GROUPS: each slice of the tokens is walked by all groups.
  const unsigned slice = warp / GROUPS, slices = unsigned(args.blocks) * WARPS / GROUPS;
  const int first_head = warp % GROUPS * HEADS_PER_WARP;
  const Head head(first_head + lane.head, lane.exists);
  const bool stores = head.exists && (head.is_q ? args.dq.base : args.dk.base) != nullptr;
  Tile dweight{}, dbias{};

  if constexpr (WALKS_STAGED) {
    __shared__ unsigned long long barriers[WALKS_STAGED ? WARPS * STAGES : 1];
    walk_staged(args, shared, barriers, slice, slices, first_head, head, lane, stores, dweight, dbias);
    if (LINES_BYTES > 0) __syncthreads();  // the lines of a warp lie in slots of others
  } else {
    Raw<Param> weight;
    if (HAS_WEIGHT) weight = load_parameter(head.weight(args.parameters), head.of_stream, lane, head.exists);
    for (unsigned flat = slice; flat < args.tokens; flat += slices) {
      backward_step<true>(args, flat, head, lane, weight, stores && (!DEFERS || flat < args.stored), dweight, dbias);
    }
  }

  if (SUMS > 0 && PER_HEAD) {
    Acc* row = args.partial + (long long)(slice) * PITCH + (head.is_q ? 0 : SUMS * Q_COLUMNS);
    const int columns = head.is_q ? Q_COLUMNS : K_COLUMNS;
    if (NEEDS_WEIGHT) scatter(row + head.of_stream * HEAD_DIM, dweight, lane, head.exists);
    if (NEEDS_BIAS) scatter(row + int(NEEDS_WEIGHT) * columns + head.of_stream * HEAD_DIM, dbias, lane, head.exists);
  } else if (SUMS > 0) {
    Acc* const lines = reinterpret_cast<Acc*>(shared);
    if (NEEDS_WEIGHT) block_sums(lines, args.partial, 0, dweight, lane);
    if (NEEDS_BIAS) block_sums(lines, args.partial, int(NEEDS_WEIGHT), dbias, lane);
  }
}
