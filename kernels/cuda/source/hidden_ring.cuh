// A warp's heads of the tokens that come next, on their way into shared memory while it computes (sm_90 and later): as
// ring.cuh, for the teams of hidden.cuh.
//
// A warp has STAGES slots of its own, each for its heads of one token: x, and in the backward g. A lane has at most one
// copy, the same for every token, of up to HEADS_A_COPY heads.
#pragma once
#include "bulk.cuh"
#include "hidden.cuh"

// KINDS: 1 for x, 2 for x and g, whose elements are of one size. USED: where it is not, nothing is set up.
template <int KINDS, bool USED>
struct RowRing {
  static constexpr int HEAD = HEAD_DIM * int(sizeof(In)), KIND = HEADS_A_WARP * HEAD;  // bytes
  static constexpr int SLOT = KINDS * KIND, WARP = STAGES * SLOT;
  static constexpr int A_COPY = HEADS_A_COPY < HEADS_A_WARP ? HEADS_A_COPY : HEADS_A_WARP;
  static constexpr int RUNS = (HEADS_A_WARP + A_COPY - 1) / A_COPY;
  static_assert(!USED || (KINDS * RUNS <= 32 && HEAD % 16 == 0), "a lane has one copy, of 16 bytes at a time");

  // This lane's copy.
  const char* from;
  long long batch, token;  // strides
  int size;  // 0: none
  unsigned to;  // within a slot

  unsigned slots, barriers;  // of this warp
  unsigned bytes;  // of all its copies of one token
  int stage;  // the next slot to be taken from
  unsigned parity;  // of its barrier

  // `x` and, for two kinds, `g`: of the team's stream.
  __device__ RowRing(const Heads& x, const Heads& g, const char* memory, const unsigned long long* all_barriers,
                     const Team& team)
      : from(nullptr), batch(0), token(0), size(0), to(0), stage(0), parity(0) {
    if (!USED) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    slots = bulk::shared_address(memory) + warp * WARP;
    barriers = bulk::shared_address(all_barriers) + warp * STAGES * 8;
    bytes = KINDS * team.heads() * HEAD;
    const int kind = lane / RUNS, first = lane % RUNS * A_COPY, left = team.heads() - first;
    if (kind < KINDS && left > 0) {
      const Heads& heads = kind == 0 ? x : g;
      from = heads.at({0, 0}, team.first_head() + first, team.is_q);
      batch = heads.batch;
      token = heads.token;
      size = (left < A_COPY ? left : A_COPY) * HEAD;
      to = kind * KIND + first * HEAD;
    }
    if (lane == 0) {
#pragma unroll
      for (int s = 0; s < STAGES; ++s) bulk::init(barriers + s * 8);
      bulk::fence();
    }
    __syncwarp();
  }

  // Slot `s`, which nobody reads from any more, is to hold this token.
  __device__ __forceinline__ void fill(int s, const Token& of) const {
    const unsigned barrier = barriers + s * 8;
    if (threadIdx.x % 32 == 0) bulk::expect(barrier, bytes);
    if (size > 0) {
      bulk::copy(slots + s * SLOT + to, from + (BATCHED ? of.batch * batch : 0) + of.index * token, size, barrier);
    }
  }
  // The next token is there.
  __device__ __forceinline__ void wait() const { bulk::wait(barriers + stage * 8, parity); }

  // The u-th head of this thread.
  template <class T>
  __device__ __forceinline__ Raw<T> take(int kind, int u, Side side, const Lane& lane, bool exists) const {
    const unsigned head = slots + stage * SLOT + kind * KIND + (u * HEADS_PER_WARP + lane.head) * HEAD;
    return bulk::take_head<T>(side, head, lane, exists);
  }
  // All lanes have what the slot held: it is filled again, where there is a token.
  __device__ __forceinline__ void refill(bool more, const Token& of) {
    bulk::fence();
    __syncwarp();
    if (more) fill(stage, of);
    stage = stage + 1 < STAGES ? stage + 1 : 0;
    parity ^= stage == 0;
  }
};
