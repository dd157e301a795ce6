// What comes into shared memory ahead of its turn (sm_90 and later), as ring.cuh and hidden_ring.cuh have it: slots, each
// for one token, which bulk copies fill and whose barrier counts their bytes.
#pragma once
#include "bulk.cuh"
#include "streams.cuh"

constexpr bool STAGED_TABLES = TABLES == STAGED && ROTATES;
static_assert(!STAGED_TABLES || TABLE_ROW_BYTES % 16 == 0, "what a bulk copy takes");
// Accesses that are narrower than the host planned, because an address is, are none that a bulk copy takes.
constexpr bool COPIES_TABLES = !STAGED_TABLES || TABLE_BYTES == 16;

// The slots of those that share them: a warp, or a team of warps.
struct SlotRing {
  unsigned slots, barriers;
  int stage;  // the next slot to be taken from
  unsigned parity;  // of its barrier

  __device__ SlotRing(unsigned slots, unsigned barriers) : slots(slots), barriers(barriers), stage(0), parity(0) {}

  // By one thread.
  __device__ __forceinline__ void set_up() const {
#pragma unroll
    for (int s = 0; s < STAGES; ++s) bulk::init(barrier(s));
    bulk::fence();  // the copies see barriers that are set up
  }
  __device__ __forceinline__ unsigned barrier(int s) const { return barriers + s * bulk::BARRIER_BYTES; }
  // The next token is there.
  __device__ __forceinline__ void wait() const { bulk::wait(barrier(stage), parity); }
  __device__ __forceinline__ void advance() {
    stage = stage + 1 < STAGES ? stage + 1 : 0;
    parity ^= stage == 0;
  }
};

// A lane's copy, the same for every token.
struct LaneCopy {
  const char* from;
  long long batch, token;  // strides
  int bytes;  // 0: none
  unsigned to;  // within a slot

  __device__ LaneCopy() : from(nullptr), batch(0), token(0), bytes(0), to(0) {}
  __device__ __forceinline__ void start(const Token& of, unsigned slot, unsigned barrier) const {
    if (bytes > 0) bulk::copy(slot + to, from + (BATCHED ? of.batch * batch : 0) + of.index * token, bytes, barrier);
  }
};

// The first tokens of a walk into all slots of a ring.
template <class Ring>
__device__ __forceinline__ void fill_all(const Ring& ring, Walk& ahead, long long tokens) {
#pragma unroll
  for (int s = 0; s < STAGES; ++s, ahead.advance()) {
    if (ahead.flat < tokens) ring.fill(s, ahead.token());
  }
}
