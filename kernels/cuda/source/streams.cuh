// Where the heads of q, k and v stand in memory.
#pragma once
#include "tables.cuh"

// Strides are in bytes. GROUP > 0 (grouped packing): q head h is member h % GROUP of group h / GROUP.
struct Heads {
  char* base;
  long long batch, token, group, head;

  __device__ char* at(const Token& t, int h, bool grouped) const {
    const long long offset = GROUP > 0 && grouped ? (h / GROUP) * group + (h % GROUP) * head : h * head;
    return base + t.batch * batch + t.index * token + offset;
  }
};

// Pointers are null where an argument is absent.
struct Parameters {
  const char* q_weight;
  const char* q_bias;
  const char* k_weight;
  const char* k_bias;
};

// One head of the order q, k.
struct Head {
  int of_stream;
  bool is_q, exists;

  __device__ Head(int index, bool lane_exists) {
    exists = lane_exists && index < HEADS;
    is_q = index < Q_HEADS;
    of_stream = is_q ? index : index - Q_HEADS;
  }
  __device__ char* at(const Heads& q, const Heads& k, const Token& token) const {
    return is_q ? q.at(token, of_stream, true) : k.at(token, of_stream, false);
  }
  __device__ const char* weight(const Parameters& p) const { return is_q ? p.q_weight : p.k_weight; }
  __device__ const char* bias(const Parameters& p) const { return is_q ? p.q_bias : p.k_bias; }
};

// Where one head stands, token by token.
struct Place {
  char* first;
  long long batch, token;

  __device__ Place(const Heads& heads, int head, bool grouped)
      : first(heads.at({0, 0}, head, grouped)), batch(heads.batch), token(heads.token) {}
  __device__ char* at(const Token& t) const { return first + (BATCHED ? t.batch * batch : 0) + t.index * token; }
};

// v is only moved, by blocks of its own, which come after those of the heads: the warps of the heads all have the same to
// do, and these blocks fill the card while the last of those end. A thread moves VECTORS_A_THREAD vectors.
constexpr int VECTORS_A_HEAD = HEAD_DIM / PAIRS, VECTORS_A_THREAD = 4;
constexpr int VECTORS_A_TOKEN = (V_HEADS > 0 ? V_HEADS : 1) * VECTORS_A_HEAD;  // a divisor, also where v is not moved

__device__ __forceinline__ char* vector_address(const Heads& v, long long flat, int vector, long long sequence) {
  char* const head = v.at(token_at(unsigned(flat), sequence), vector / VECTORS_A_HEAD, false);
  return head + vector % VECTORS_A_HEAD * (PAIRS * int(sizeof(In)));
}

template <int LOAD_BYTES, int STORE_BYTES>
__device__ __forceinline__ void move_heads(const Heads& from, const Heads& to, unsigned block, long long tokens,
                                           long long sequence) {
  if constexpr (V_HEADS > 0) {
    Vector<In, PAIRS> vectors[VECTORS_A_THREAD];
    const long long first = (long long)(block) * (32 * WARPS * VECTORS_A_THREAD) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < VECTORS_A_THREAD; ++i) {
      const long long index = first + i * (32 * WARPS), flat = index / VECTORS_A_TOKEN;
      const char* address = vector_address(from, flat, int(index % VECTORS_A_TOKEN), sequence);
      vectors[i] = load<LOAD_BYTES, In, PAIRS>(address, flat < tokens);
    }
#pragma unroll
    for (int i = 0; i < VECTORS_A_THREAD; ++i) {
      const long long index = first + i * (32 * WARPS), flat = index / VECTORS_A_TOKEN;
      char* address = vector_address(to, flat, int(index % VECTORS_A_TOKEN), sequence);
      store<STORE_BYTES>(address, vectors[i], flat < tokens);
    }
  }
}
