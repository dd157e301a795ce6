// A norm over the whole row of q, and one over that of k: all heads of a token together (OLMo 2). What follows from the
// sums over a row, and how the lanes of one head take part.
#pragma once
#include "norm.cuh"
#include "streams.cuh"

// Of the row of one stream: 1 / (its lanes).
__device__ __forceinline__ Acc one_over_lanes(bool is_q) {
  constexpr int K_LANES = (K_HEADS > 0 ? K_HEADS : Q_HEADS) * HEAD_DIM;
  return is_q ? Acc(1.0 / (Q_HEADS * HEAD_DIM)) : Acc(1.0 / K_LANES);
}

// What a thread adds to the sums over the row: of x (LayerNorm), of x^2, of u x and of u, with u = g w.
__device__ __forceinline__ Acc sum_of(const Tile& x) {
  Acc total = 0;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) total += x.a[c][i] + x.b[c][i];
  }
  return total;
}

__device__ __forceinline__ Acc sum_of(const Tile& x, const Tile& y) {
  Acc total = 0;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      total += x.a[c][i] * y.a[c][i];
      total += x.b[c][i] * y.b[c][i];
    }
  }
  return total;
}

__device__ __forceinline__ void multiply(Tile& x, const Tile& y) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      x.a[c][i] *= y.a[c][i];
      x.b[c][i] *= y.b[c][i];
    }
  }
}

// x + factor y, in place.
__device__ __forceinline__ void add_scaled(Tile& x, const Tile& y, Acc factor) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      x.a[c][i] += factor * y.a[c][i];
      x.b[c][i] += factor * y.b[c][i];
    }
  }
}

// sum + x y, in place.
__device__ __forceinline__ void accumulate_products(Tile& sum, const Tile& x, const Tile& y) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      sum.a[c][i] += x.a[c][i] * y.a[c][i];
      sum.b[c][i] += x.b[c][i] * y.b[c][i];
    }
  }
}

// x as it lies in memory becomes the norm's input.
__device__ __forceinline__ Tile norm_input(const Raw<In>& raw, const Rotation& rotation, const Lane& lane) {
  Tile x = unpack(READ, raw, lane);
  if (ROTATES && !NORM_FIRST) rotation.apply(x, lane);
  return x;
}
