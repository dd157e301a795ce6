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

// One head of the order q, k, v.
struct Head {
  int index, of_stream;
  bool is_q, is_v, exists;

  __device__ Head(int index, bool lane_exists) : index(index) {
    exists = lane_exists && index < ALL_HEADS;
    is_q = index < Q_HEADS;
    is_v = V_HEADS > 0 && index >= ROTATED_HEADS;
    of_stream = is_q ? index : is_v ? index - ROTATED_HEADS : index - Q_HEADS;
  }
  __device__ bool rotates() const { return exists && !is_v; }

  // Field by field: a reference that depends on the lane would be a load from a varying address.
  __device__ char* at(const Heads& q, const Heads& k, const Heads& v, const Token& token) const {
    char* result = is_q ? q.at(token, of_stream, true) : k.at(token, of_stream, false);
    return is_v ? v.at(token, of_stream, false) : result;
  }
  __device__ const char* weight(const Parameters& p) const { return is_q ? p.q_weight : p.k_weight; }
  __device__ const char* bias(const Parameters& p) const { return is_q ? p.q_bias : p.k_bias; }
};
