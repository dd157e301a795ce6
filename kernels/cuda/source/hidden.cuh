// The norm over a row by the warps of a block (hidden_norm.cuh has the formulas).
//
// A block holds one token after the other, all heads of it: a team of Q_WARPS warps has the row of q, one of K_WARPS that
// of k. A warp has HEADS_A_WARP heads, a thread UNROLL slots, the same for every token, so weights and the sums of their
// gradients stay in registers. A team meets at a barrier of its own, once a token: nobody waits for the other stream, and
// the bytes of the tokens that come next are on their way meanwhile (hidden_ring.cuh).
#pragma once
#include "hidden_norm.cuh"

constexpr int HEADS_A_WARP = HEADS_PER_WARP * UNROLL;
constexpr int Q_WARPS = (Q_HEADS + HEADS_A_WARP - 1) / HEADS_A_WARP;
constexpr int K_WARPS = (K_HEADS + HEADS_A_WARP - 1) / HEADS_A_WARP;
static_assert(WARPS == Q_WARPS + K_WARPS, "a block holds all heads of a token");

struct Team {
  bool is_q;
  int first, warp;  // its first warp; this one, within the team

  __device__ Team() {
    const int of_block = threadIdx.x / 32;
    is_q = of_block < Q_WARPS;
    first = is_q ? 0 : Q_WARPS;
    warp = of_block - first;
  }
  __device__ int warps() const { return is_q ? Q_WARPS : K_WARPS; }
  // Of this warp, within the stream.
  __device__ int first_head() const { return warp * HEADS_A_WARP; }
  __device__ int heads() const {
    const int left = (is_q ? Q_HEADS : K_HEADS) - first_head();
    return left < HEADS_A_WARP ? left : HEADS_A_WARP;
  }
  // The u-th head of a thread. A stream's last warp may hold fewer than the others.
  __device__ Head head(int u, const Lane& lane) const {
    const int within = u * HEADS_PER_WARP + lane.head;
    return Head((is_q ? 0 : Q_HEADS) + first_head() + within, lane.exists && within < heads());
  }
};

// Where the warps of a team exchange their sums: two places that take turns, so that one barrier a sum is enough. A warp
// writes a place again behind the barrier of the other, where all have read this one.
constexpr int SUMS_AT_ONCE = 4;
struct Exchange {
  Acc (*of_warps)[WARPS][SUMS_AT_ONCE];
  int turn;

  // The sums of all threads of the team, in a fixed order: every thread gets the same bits.
  template <int N>
  __device__ __forceinline__ void add_up(Acc (&sums)[N], const Team& team) {
    static_assert(N <= SUMS_AT_ONCE, "");
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
#pragma unroll
      for (int n = 0; n < N; ++n) sums[n] += __shfl_xor_sync(0xffffffffu, sums[n], step);
    }
    Acc (*const place)[SUMS_AT_ONCE] = of_warps[turn] + team.first;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int n = 0; n < N; ++n) place[team.warp][n] = sums[n];
    }
    asm volatile("bar.sync %0, %1;" ::"r"(team.is_q ? 1 : 2), "r"(32 * team.warps()) : "memory");
    constexpr int MOST = Q_WARPS > K_WARPS ? Q_WARPS : K_WARPS;
#pragma unroll
    for (int n = 0; n < N; ++n) sums[n] = 0;
#pragma unroll
    for (int w = 0; w < MOST; ++w) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (w < team.warps()) sums[n] += place[w][n];
      }
    }
    turn ^= 1;
  }
};

// With several slots a thread, each is read twice, for the sums and behind them: kept, they would take more registers than
// there are.
constexpr bool SEVERAL = UNROLL * CHUNKS > 1;

// What was unpacked of these vectors is unpacked again behind here, for the same reason. (The compiler would keep weights
// in float from token to token.)
template <class T>
__device__ __forceinline__ void forget_unpacked(Raw<T>& raw) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < Vector<T, PAIRS>::WORDS; ++i) {
      asm volatile("" : "+r"(raw.first[c].words[i]), "+r"(raw.second[c].words[i]));
    }
  }
}
