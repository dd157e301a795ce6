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

// The v heads of a token are moved as they are. Their vectors are dealt to all lanes of the GROUPS warps that share the
// token, so that no warp has more to do than another; the last group, which may hold fewer heads, comes first.
template <int GROUPS>
struct Moved {
  static constexpr int VECTORS = V_HEADS * (HEAD_DIM / PAIRS);
  static constexpr int EACH = (VECTORS + 32 * GROUPS - 1) / (32 * GROUPS);
  Vector<In, PAIRS> vectors[EACH > 0 ? EACH : 1];
  int first;

  __device__ explicit Moved(int group) : first((GROUPS - 1 - group) * 32 + threadIdx.x % 32) {}

  template <int BYTES>
  __device__ void load(const Heads& v, const Token& token, bool active) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int vector = first + i * 32 * GROUPS;
      vectors[i] = ::load<BYTES, In, PAIRS>(address(v, token, vector), active && vector < VECTORS);
    }
  }
  template <int BYTES>
  __device__ void store(const Heads& v, const Token& token) const {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int vector = first + i * 32 * GROUPS;
      ::store<BYTES>(address(v, token, vector), vectors[i], vector < VECTORS);
    }
  }
  static __device__ char* address(const Heads& v, const Token& token, int vector) {
    constexpr int A_HEAD = HEAD_DIM / PAIRS;
    return v.at(token, vector / A_HEAD, false) + vector % A_HEAD * (PAIRS * int(sizeof(In)));
  }
};

// Or blocks of their own, after those of the heads, move v: VECTORS_A_THREAD vectors each, next to those of its neighbours.
constexpr int VECTORS_A_TOKEN = V_HEADS * (HEAD_DIM / PAIRS), VECTORS_A_THREAD = 4;

template <int IN, int OUT>
__device__ __forceinline__ void move_heads(const Heads& from, const Heads& to, unsigned block, long long tokens,
                                           long long sequence) {
  if constexpr (V_HEADS > 0) {
    Vector<In, PAIRS> vectors[VECTORS_A_THREAD];
    const long long first = (long long)(block) * (32 * WARPS * VECTORS_A_THREAD) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < VECTORS_A_THREAD; ++i) {
      const long long index = first + i * (32 * WARPS), flat = index / VECTORS_A_TOKEN;
      const char* address = Moved<1>::address(from, token_at(unsigned(flat), sequence), int(index % VECTORS_A_TOKEN));
      vectors[i] = load<IN, In, PAIRS>(address, flat < tokens);
    }
#pragma unroll
    for (int i = 0; i < VECTORS_A_THREAD; ++i) {
      const long long index = first + i * (32 * WARPS), flat = index / VECTORS_A_TOKEN;
      char* address = Moved<1>::address(to, token_at(unsigned(flat), sequence), int(index % VECTORS_A_TOKEN));
      store<OUT>(address, vectors[i], flat < tokens);
    }
  }
}
