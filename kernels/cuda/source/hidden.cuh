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
constexpr int MOST_WARPS = Q_WARPS > K_WARPS ? Q_WARPS : K_WARPS;
constexpr int MOST_HEADS = Q_HEADS > K_HEADS ? Q_HEADS : K_HEADS;
constexpr bool SEVERAL = UNROLL * CHUNKS > 1;  // slots a thread
static_assert(WARPS == Q_WARPS + K_WARPS, "a block holds all heads of a token");

struct Team {
  bool is_q;
  int warp;  // of this thread, within the team

  __device__ Team() {
    const int of_block = threadIdx.x / 32;
    is_q = of_block < Q_WARPS;
    warp = is_q ? of_block : of_block - Q_WARPS;
  }
  __device__ int warps() const { return is_q ? Q_WARPS : K_WARPS; }
  __device__ int heads() const { return is_q ? Q_HEADS : K_HEADS; }
  // The u-th head of a thread within its stream; a stream's last warp may hold fewer than the others.
  __device__ int of_stream(int u, const Lane& lane) const {
    return warp * HEADS_A_WARP + u * HEADS_PER_WARP + lane.head;
  }
  __device__ bool exists(int u, const Lane& lane) const {
    if (Q_HEADS % HEADS_A_WARP == 0 && K_HEADS % HEADS_A_WARP == 0) return lane.exists;
    return lane.exists && of_stream(u, lane) < heads();
  }
  __device__ Head head(int u, const Lane& lane) const {
    return Head((is_q ? 0 : Q_HEADS) + of_stream(u, lane), exists(u, lane));
  }
};

// Where a thread's heads of one tensor stand, token by token.
struct Places {
  Place first;
  long long apart;  // of a thread's heads
  const Heads& heads;

  __device__ Places(const Heads& heads, const Team& team, const Lane& lane)
      : first(heads, team.of_stream(0, lane), team.is_q), apart(HEADS_PER_WARP * heads.head), heads(heads) {}
  __device__ char* at(const Token& token, int u, const Team& team, const Lane& lane) const {
    if (GROUP > 0 || SEVERAL || STAGES == 0) return heads.at(token, team.of_stream(u, lane), team.is_q);
    return first.at(token) + u * apart;
  }
};

// The u-th head of this thread, where no ring brings it.
template <int BYTES, class T>
__device__ __forceinline__ Raw<T> load_row(Side side, const Heads& heads, int u, const Token& token, const Team& team,
                                           const Lane& lane) {
  const char* const head = heads.at(token, team.of_stream(u, lane), team.is_q);
  return load_head<BYTES, T>(side, head, lane, team.exists(u, lane));
}

// Where the warps of a team exchange their sums: two places that take turns, so that one barrier a sum is enough. A warp
// writes a place again behind the barrier of the other, where all have read this one.
constexpr int SUMS_AT_ONCE = NORM == LAYER ? 3 : 2;
struct Exchange {
  static constexpr int WIDTH = (MOST_WARPS + 3) / 4 * 4;  // warps of a place, read four at a time; absent ones give zero
  using Sums = Acc[2][2][SUMS_AT_ONCE][WIDTH];
  Sums& sums;
  int turn;

  // All threads of the block come here, once.
  __device__ explicit Exchange(Sums& sums) : sums(sums), turn(0) {
    for (int i = threadIdx.x; i < 4 * SUMS_AT_ONCE * WIDTH; i += 32 * WARPS) (&sums[0][0][0][0])[i] = 0;
    __syncthreads();
  }

  // The sums of all threads of the team, in a fixed order: every thread gets the same bits.
  template <int N>
  __device__ __forceinline__ void add_up(Acc (&values)[N], const Team& team) {
    static_assert(N <= SUMS_AT_ONCE, "");
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
#pragma unroll
      for (int n = 0; n < N; ++n) values[n] += __shfl_xor_sync(ALL_LANES, values[n], step);
    }
    Acc (&place)[SUMS_AT_ONCE][WIDTH] = sums[turn][team.is_q ? 0 : 1];
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int n = 0; n < N; ++n) place[n][team.warp] = values[n];
    }
    // A barrier for each team; 0 is __syncthreads'.
    asm volatile("bar.sync %0, %1;" ::"r"(team.is_q ? 1 : 2), "r"(32 * team.warps()) : "memory");
#pragma unroll
    for (int n = 0; n < N; ++n) {
      values[n] = 0;
#pragma unroll
      for (int w = 0; w < WIDTH; ++w) values[n] += place[n][w];
    }
    turn ^= 1;
  }
};

// What was unpacked of these vectors is unpacked again behind here: kept, it would take more registers than there are.
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
