// The rows of the tokens that come next, on their way into shared memory while the block computes (sm_90 and later): as
// ring.cuh, for the teams of hidden.cuh.
//
// A team has STAGES slots, each for its row of one token: x, in the backward g, and (TABLES == STAGED) cos and sin. One
// warp of the team makes the copies, behind the barrier at which the team adds up its sums: by then every warp has what the
// slot held. A lane has one copy of up to HEADS_A_COPY heads, the same for every token; others only where heads do not
// adjoin.
#pragma once
#include "hidden.cuh"
#include "stages.cuh"

static_assert(!STAGED_TABLES || MROPE == NO_MROPE, "a token's tables are one row each");

// KINDS: 1 for x, 2 for x and g, whose elements are of one size. USED: where it is not, nothing is set up.
template <int KINDS, bool USED>
struct RowRing : SlotRing {
  static constexpr int HEAD = HEAD_DIM * int(sizeof(In));  // bytes
  static constexpr int OF_TABLES = STAGED_TABLES ? 2 * TABLE_ROW_BYTES : 0;
  static constexpr int Q_SLOT = KINDS * Q_HEADS * HEAD + OF_TABLES, K_SLOT = KINDS * K_HEADS * HEAD + OF_TABLES;
  static constexpr int A_COPY = HEADS_A_COPY < MOST_HEADS ? HEADS_A_COPY : MOST_HEADS;
  static constexpr int RUNS = (MOST_HEADS + A_COPY - 1) / A_COPY;
  static_assert(!USED || HEAD % 16 == 0, "what a bulk copy takes");

  LaneCopy mine;  // of the warp that makes them
  const Heads &x, &g;
  const Tables& tables;
  bool is_q;
  int heads;
  int slot_bytes, kind_bytes;
  bool copies;  // by this warp

  // `x` and, for two kinds, `g`: of the team's stream. All threads of the block come here, and then to a barrier.
  __device__ RowRing(const Heads& x, const Heads& g, const Tables& tables, const char* memory,
                     const unsigned long long (&all_barriers)[2][STAGES > 0 ? STAGES : 1], const Team& team)
      : SlotRing(bulk::shared_address(memory) + (team.is_q ? 0 : STAGES * Q_SLOT),
                 bulk::shared_address(all_barriers[team.is_q ? 0 : 1])),
        x(x), g(g), tables(tables), is_q(team.is_q), heads(team.heads()), slot_bytes(team.is_q ? Q_SLOT : K_SLOT),
        kind_bytes(team.heads() * HEAD), copies(team.warp == 0) {
    if (!USED) return;
    const int lane = threadIdx.x % 32;
    if (copies && first_head(lane) < heads && lane < KINDS * RUNS) {
      const Heads& source = lane < RUNS ? x : g;
      mine.from = source.at({0, 0}, first_head(lane), is_q);
      mine.batch = source.batch;
      mine.token = source.token;
      mine.bytes = bytes(lane);
      mine.to = place(lane);
    }
    if (copies && lane == 0) set_up();
    __syncwarp();
  }

  // Slot `s`, which nobody reads from any more, is to hold this token.
  __device__ __forceinline__ void fill(int s, const Token& of) const {
    if (!copies) return;
    const int lane = threadIdx.x % 32;
    const unsigned slot = slots + s * slot_bytes;
    if (lane == 0) bulk::expect(barrier(s), slot_bytes);
    mine.start(of, slot, barrier(s));
#pragma unroll 1
    for (int copy = lane + 32; copy < KINDS * RUNS; copy += 32) {
      if (first_head(copy) >= heads) continue;
      const char* const source = (copy < RUNS ? x : g).at(of, first_head(copy), is_q);
      bulk::copy(slot + place(copy), source, bytes(copy), barrier(s));
    }
    if (STAGED_TABLES && lane < 2) {
      const long long row = (BATCHED ? of.batch * tables.batch : 0) + of.index * tables.token;
      bulk::copy(slot + KINDS * kind_bytes + lane * TABLE_ROW_BYTES, (lane == 0 ? tables.cos : tables.sin) + row,
                 TABLE_ROW_BYTES, barrier(s));
    }
  }

  // The u-th head of this thread.
  template <class T>
  __device__ __forceinline__ Raw<T> take(int kind, int u, Side side, const Team& team, const Lane& lane) const {
    const unsigned head = slots + stage * slot_bytes + kind * kind_bytes + team.of_stream(u, lane) * HEAD;
    return bulk::take_head<T>(side, head, lane, team.exists(u, lane));
  }
  __device__ __forceinline__ void take_tables(RotationRaw& raw, const Lane& lane) const {
    const unsigned cos = slots + stage * slot_bytes + KINDS * kind_bytes;
    bulk::take_tables(raw, lane, cos, cos + TABLE_ROW_BYTES);
  }

 private:
  // Of the copies of a token: first those of x, then those of g.
  __device__ static int first_head(int copy) { return copy % RUNS * A_COPY; }
  __device__ int bytes(int copy) const {
    const int left = heads - first_head(copy);
    return (left < A_COPY ? left : A_COPY) * HEAD;
  }
  __device__ int place(int copy) const { return copy / RUNS * kind_bytes + first_head(copy) * HEAD; }
};
