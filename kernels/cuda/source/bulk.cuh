// Bulk copies from memory to shared memory, the barriers that count their bytes, and reads of what they brought (sm_90 and
// later). All addresses of shared memory are 32-bit.
#pragma once
#include "tables.cuh"

namespace bulk {

__device__ __forceinline__ unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

constexpr int BARRIER_BYTES = 8;

__device__ __forceinline__ void init(unsigned barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

// The barrier's phase ends when so many bytes have come.
__device__ __forceinline__ void expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy(unsigned to, const char* from, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {
  unsigned done = 0;
  while (!done) {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  }
}

// Between what threads do with shared memory (barriers set up, slots read) and copies that come after: only a proxy fence
// orders the two.
__device__ __forceinline__ void fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// 16 bytes become the elements from i on; zeros where not active.
template <class T, int N>
__device__ __forceinline__ void take_16_bytes(Vector<T, N>& v, int i, unsigned address, bool active) {
  const int w = i * int(sizeof(T)) / 4;
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n\t"
      "@p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(v.words[w]), "=&r"(v.words[w + 1]), "=&r"(v.words[w + 2]), "=&r"(v.words[w + 3])
      : "r"(address), "r"(int(active)) : "memory");
}

// As `load_head` (lanes.cuh), from shared memory.
template <class T>
__device__ __forceinline__ Raw<T> take_head(Side side, unsigned head, const Lane& lane, bool active) {
  Raw<T> raw;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int slot = lane.slot_of(c);
    const bool here = active && lane.holds(c);
#pragma unroll
    for (int i = 0; i < PAIRS; i += 16 / int(sizeof(T))) {
      take_16_bytes(raw.first[c], i, head + (vector_lane(side, slot, 0) + i) * int(sizeof(T)), here);
      take_16_bytes(raw.second[c], i, head + (vector_lane(side, slot, 1) + i) * int(sizeof(T)), here);
    }
  }
  return raw;
}

// As `RotationRaw::load` (tables.cuh), from shared memory; `cos` and `sin` give the address of an entry.
template <class Cos, class Sin>
__device__ __forceinline__ void take_tables(RotationRaw& raw, const Lane& lane, const Cos& cos, const Sin& sin) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int slot = lane.slot_of(c);
    const bool needed = rotated(slot) && lane.holds(c);
#pragma unroll
    for (int i = 0; i < PAIRS; i += 16 / int(sizeof(Table))) {
      if (PER_LANE) {
        const int first = vector_lane(WRITE, slot, 0) - ROTARY_START + i;
        const int second = vector_lane(WRITE, slot, 1) - ROTARY_START + i;
        take_16_bytes(raw.cos.first[c], i, cos(first), needed);
        take_16_bytes(raw.sin.first[c], i, sin(first), needed);
        take_16_bytes(raw.cos.second[c], i, cos(second), needed);
        take_16_bytes(raw.sin.second[c], i, sin(second), needed);
      } else {
        const int entry = pair_index(slot, i);
        take_16_bytes(raw.cos.first[c], i, cos(entry), needed);
        take_16_bytes(raw.sin.first[c], i, sin(entry), needed);
      }
    }
  }
}

// From rows of cos and sin that begin at these addresses.
__device__ __forceinline__ void take_tables(RotationRaw& raw, const Lane& lane, unsigned cos, unsigned sin) {
  take_tables(raw, lane, [=](int entry) { return cos + entry * int(sizeof(Table)); },
              [=](int entry) { return sin + entry * int(sizeof(Table)); });
}

}  // namespace bulk
