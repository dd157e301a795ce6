// x and g of a warp's next tokens, on their way into shared memory while it computes (sm_90 and later).
//
// A warp has STAGES slots of its own, each for its heads of one token: x, then g. Bulk copies fill them, one a head or a
// run of heads; they take no registers and leave the L1 to the tables. One lane tells the slot's barrier how many bytes
// will come; each copy counts its own there; all lanes wait for the count, take their vectors, and the slot is filled
// again.
#pragma once
#include "streams.cuh"

constexpr bool STAGED = STAGES > 0 && HAS_X && IN_BYTES == 16 && GRAD_BYTES == 16;

__device__ __forceinline__ unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

struct Ring {
  static constexpr int X_HEAD = HEAD_DIM * int(sizeof(In)), G_HEAD = HEAD_DIM * int(sizeof(Grad));  // bytes
  static constexpr int X = HEADS_PER_WARP * X_HEAD, SLOT = X + HEADS_PER_WARP * G_HEAD, WARP = STAGES * SLOT;
  static_assert(!STAGED || (HEADS_PER_WARP <= 16 && X_HEAD % 16 == 0 && G_HEAD % 16 == 0), "what a bulk copy takes");

  Place from;  // the heads that this lane copies: x in the lower half of the warp, g in the upper one
  int size;  // of these; 0: none
  unsigned to;  // within a slot
  unsigned slots, barriers;  // of this warp
  unsigned bytes;  // of all its copies of one token
  int stage;  // the next slot to be taken from
  unsigned parity;  // of its barrier

  // Heads of one stream that adjoin in memory are one copy.
  struct Part {
    int first, count;  // of the warp's heads

    __device__ explicit Part(int first_head) {
      const int within = threadIdx.x % 16, all = at_most(HEADS - first_head);
      const int of_q = first_head < Q_HEADS ? at_most(Q_HEADS - first_head) : 0;
      first = HEADS_ADJOIN ? (within == 0 ? 0 : of_q) : within;
      count = HEADS_ADJOIN ? (within == 0 ? of_q : within == 1 ? all - of_q : 0) : int(within < all);
    }
    __device__ static int at_most(int heads) { return heads < HEADS_PER_WARP ? heads : HEADS_PER_WARP; }
  };

  template <class Arguments>
  __device__ Ring(const Arguments& args, const char* memory, const unsigned long long* all_barriers, int first_head)
      : Ring(args, memory, all_barriers, first_head, Part(first_head)) {}

  template <class Arguments>
  __device__ Ring(const Arguments& args, const char* memory, const unsigned long long* all_barriers, int first_head,
                  const Part& part)
      : Ring(args, memory, all_barriers, first_head, part, Head(first_head + part.first, true)) {}

  template <class Arguments>
  __device__ Ring(const Arguments& args, const char* memory, const unsigned long long* all_barriers, int first_head,
                  const Part& part, const Head& head)
      : from(copies_x() ? (head.is_q ? args.q : args.k) : (head.is_q ? args.q_grad : args.k_grad), head.of_stream,
             head.is_q),
        stage(0), parity(0) {
    const int warp = threadIdx.x / 32, of_a_head = copies_x() ? X_HEAD : G_HEAD;
    size = part.count * of_a_head;
    to = (copies_x() ? 0 : X) + part.first * of_a_head;
    slots = shared_address(memory) + warp * WARP;
    barriers = shared_address(all_barriers) + warp * STAGES * 8;
    bytes = Part::at_most(HEADS - first_head) * (X_HEAD + G_HEAD);
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int s = 0; s < STAGES; ++s) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + s * 8) : "memory");
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copies see barriers that are set up
    }
    __syncwarp();
  }

  // Slot `s`, which nobody reads from any more, is to hold this token.
  __device__ __forceinline__ void fill(int s, const Token& token) const {
    const unsigned barrier = barriers + s * 8;
    if (threadIdx.x % 32 == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    }
    if (size > 0) {
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                   ::"r"(slots + s * SLOT + to), "l"(from.at(token)), "r"(size), "r"(barrier) : "memory");
    }
  }

  // The next token is there.
  __device__ __forceinline__ void wait() const {
    unsigned done = 0;
    while (!done) {
      asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                   : "=r"(done) : "r"(barriers + stage * 8), "r"(parity) : "memory");
    }
  }
  __device__ __forceinline__ Raw<In> x(const Lane& lane, bool active) const {
    return take<In>(READ, slots + stage * SLOT + lane.head * X_HEAD, lane, active);
  }
  __device__ __forceinline__ Raw<Grad> g(const Lane& lane, bool active) const {
    return take<Grad>(WRITE, slots + stage * SLOT + X + lane.head * G_HEAD, lane, active);
  }
  // All lanes have what the slot held. Without the fence a copy into it may overtake their reads, which wait in one queue
  // with the other loads of the multiprocessor.
  __device__ __forceinline__ static void taken() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
  }
  __device__ __forceinline__ void advance() {
    stage = stage + 1 < STAGES ? stage + 1 : 0;
    parity ^= stage == 0;
  }

 private:
  __device__ static bool copies_x() { return threadIdx.x % 32 < 16; }

  template <class T>
  __device__ __forceinline__ static Raw<T> take(Side side, unsigned head, const Lane& lane, bool active) {
    Raw<T> raw;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int slot = lane.slot_of(c);
      const bool here = active && lane.holds(c);
      raw.first[c] = take_vector<T>(head + vector_lane(side, slot, 0) * int(sizeof(T)), here);
      raw.second[c] = take_vector<T>(head + vector_lane(side, slot, 1) * int(sizeof(T)), here);
    }
    return raw;
  }

  template <class T>
  __device__ __forceinline__ static Vector<T, PAIRS> take_vector(unsigned address, bool active) {
    Vector<T, PAIRS> v;
#pragma unroll
    for (int w = 0; w < Vector<T, PAIRS>::WORDS; w += 4) {
      asm volatile(
          "{.reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n\t"
          "@p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];}"
          : "=&r"(v.words[w]), "=&r"(v.words[w + 1]), "=&r"(v.words[w + 2]), "=&r"(v.words[w + 3])
          : "r"(address + w * 4), "r"(int(active)) : "memory");
    }
    return v;
  }
};
