// Which lanes of a head a thread holds.
//
// A head is cut into slots of 2 x PAIRS lanes: PAIRS rotated pairs, or as many lanes that pass through. A slot is two
// vectors of PAIRS lanes in memory, 16 bytes each where the types and strides allow it. THREADS_PER_HEAD threads hold
// one head, CHUNKS slots each, so every pair lies in one thread and a rotation needs no exchange:
//
//   halves (i, i + R/2)      vectors R/2 apart; the first holds the first members of the pairs, the second the second
//   adjacent (2i, 2i + 1)    the same two vectors, each with whole pairs (SPLIT_PAIRS), which are taken apart in
//                            registers; or, if a vector is a single lane, two vectors next to each other
//   adjacent to halves       read as two vectors next to each other, written as two R/2 apart
//
// A warp holds HEADS_PER_WARP heads, which follow each other in the order: q heads, k heads.
#pragma once
#include "elements.cuh"

constexpr int SLOTS = HEAD_DIM / (2 * PAIRS);
constexpr int ROTATED_SLOTS = ROTARY_DIM / (2 * PAIRS);
constexpr int PASSING_SLOTS = SLOTS - ROTATED_SLOTS;
constexpr int THREADS_PER_HEAD = (SLOTS + CHUNKS - 1) / CHUNKS;
constexpr int HEADS_PER_WARP = 32 / THREADS_PER_HEAD;
constexpr int HEADS = Q_HEADS + K_HEADS;
static_assert(HEAD_DIM % (2 * PAIRS) == 0 && ROTARY_DIM % (2 * PAIRS) == 0 && ROTARY_START % PAIRS == 0,
              "vectors may not straddle the rotated lanes");
static_assert(THREADS_PER_HEAD <= 32 && (!SPLIT_PAIRS || PAIRS % 2 == 0), "");

enum Side { READ, WRITE };  // of the forward: lanes of its input, lanes of its result

__device__ constexpr bool adjacent(Side side) { return side == READ ? READS_ADJACENT : WRITES_ADJACENT; }
__device__ constexpr bool neighbours(Side side) { return adjacent(side) && !SPLIT_PAIRS; }

struct Lane {
  int slot;        // of the first chunk
  int head;        // within the warp
  bool exists;

  __device__ Lane() {
    const int lane = threadIdx.x % 32;
    slot = lane % THREADS_PER_HEAD;
    head = lane / THREADS_PER_HEAD;
    exists = head < HEADS_PER_WARP;
  }
  __device__ int slot_of(int chunk) const { return slot + chunk * THREADS_PER_HEAD; }
  __device__ bool holds(int chunk) const { return SLOTS % CHUNKS == 0 || slot_of(chunk) < SLOTS; }
};

__device__ __forceinline__ bool rotated(int slot) { return PASSING_SLOTS == 0 || slot < ROTATED_SLOTS; }

// The first lane of vector `which` (0 or 1) of a slot.
__device__ __forceinline__ int vector_lane(Side side, int slot, int which) {
  if (rotated(slot)) {
    return ROTARY_START + (neighbours(side) ? 2 * slot + which : slot + which * ROTATED_SLOTS) * PAIRS;
  }
  const int lane = (slot - ROTATED_SLOTS + which * PASSING_SLOTS) * PAIRS;
  return lane < ROTARY_START ? lane : lane + ROTARY_DIM;
}

// The pair (0 .. R/2 - 1) that element i of a rotated slot belongs to.
__device__ __forceinline__ int pair_index(int slot, int i) {
  if (!SPLIT_PAIRS) return slot * PAIRS + i;
  return slot * (PAIRS / 2) + (i < PAIRS / 2 ? i : i - PAIRS / 2 + ROTARY_DIM / 4);
}

// The two vectors of each slot, as they lie in memory.
template <class T>
struct Raw {
  Vector<T, PAIRS> first[CHUNKS], second[CHUNKS];
};

// The members of the pairs: a pair is (a[c][i], b[c][i]).
struct Tile {
  Acc a[CHUNKS][PAIRS], b[CHUNKS][PAIRS];
};

template <int BYTES, class T>
__device__ __forceinline__ Raw<T> load_head(Side side, const char* head, const Lane& lane, bool active) {
  Raw<T> raw;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int slot = lane.slot_of(c);
    const bool here = active && lane.holds(c);
    raw.first[c] = load<BYTES, T, PAIRS>(head + vector_lane(side, slot, 0) * int(sizeof(T)), here);
    raw.second[c] = load<BYTES, T, PAIRS>(head + vector_lane(side, slot, 1) * int(sizeof(T)), here);
  }
  return raw;
}

template <int BYTES, class T>
__device__ __forceinline__ void store_head(Side side, char* head, const Lane& lane, const Raw<T>& raw, bool active) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int slot = lane.slot_of(c);
    const bool here = active && lane.holds(c);
    store<BYTES>(head + vector_lane(side, slot, 0) * int(sizeof(T)), raw.first[c], here);
    store<BYTES>(head + vector_lane(side, slot, 1) * int(sizeof(T)), raw.second[c], here);
  }
}

// Passing lanes have no pairs; they keep the order that the input has, in every tile.
__device__ __forceinline__ bool taken_apart(Side side, int slot) {
  return rotated(slot) ? adjacent(side) : READS_ADJACENT;
}

template <class T>
__device__ __forceinline__ Tile unpack(Side side, const Raw<T>& raw, const Lane& lane) {
  Tile tile;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const bool apart = taken_apart(side, lane.slot_of(c));
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const int even = 2 * i, odd = 2 * i + 1;
      const Acc a = element(raw.first[c], i), b = element(raw.second[c], i);
      const Acc pair_a = even < PAIRS ? element(raw.first[c], even % PAIRS) : element(raw.second[c], even % PAIRS);
      const Acc pair_b = odd < PAIRS ? element(raw.first[c], odd % PAIRS) : element(raw.second[c], odd % PAIRS);
      tile.a[c][i] = apart ? pair_a : a;
      tile.b[c][i] = apart ? pair_b : b;
    }
  }
  return tile;
}

template <class T>
__device__ __forceinline__ Raw<T> pack_tile(Side side, const Tile& tile, const Lane& lane) {
  Raw<T> raw;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const bool apart = taken_apart(side, lane.slot_of(c));
    Acc first[PAIRS], second[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const int low = i / 2, high = (PAIRS + i) / 2;  // the pair of lane i of the first and of the second vector
      first[i] = apart ? (i % 2 ? tile.b[c][low] : tile.a[c][low]) : tile.a[c][i];
      second[i] = apart ? ((PAIRS + i) % 2 ? tile.b[c][high] : tile.a[c][high]) : tile.b[c][i];
    }
    pack(raw.first[c], first);
    pack(raw.second[c], second);
  }
  return raw;
}

// Sum over the lanes of a head; every thread of the head gets the same bits.
__device__ __forceinline__ Acc head_sum(Acc value, const Lane& lane) {
  constexpr int POWER_OF_2 = THREADS_PER_HEAD & -THREADS_PER_HEAD;
  constexpr int ODD = THREADS_PER_HEAD / POWER_OF_2;
  const int first = lane.head * THREADS_PER_HEAD, within = lane.slot % POWER_OF_2;
  if (ODD > 1) {
    Acc total = 0;
#pragma unroll
    for (int j = 0; j < ODD; ++j) total += __shfl_sync(ALL_LANES, value, first + within + j * POWER_OF_2);
    value = total;
  }
#pragma unroll
  for (int step = POWER_OF_2 / 2; step > 0; step /= 2) {
    if (ODD > 1) {
      value += __shfl_sync(ALL_LANES, value, first + (within ^ step));
    } else {
      value += __shfl_xor_sync(ALL_LANES, value, step);
    }
  }
  return value;
}
