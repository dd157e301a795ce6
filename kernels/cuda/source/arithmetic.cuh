// Arithmetic on the lanes that a thread holds of a head.
//
// Lanes that do not exist (of slots or heads beyond the last) hold zeros, so they may be summed and multiplied; `subtract`
// keeps them zero.
#pragma once
#include "lanes.cuh"

__device__ __forceinline__ Acc sum_of(const Tile& x) {
  Acc total = 0;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) total += x.a[c][i] + x.b[c][i];
  }
  return total;
}

// Sum of x y.
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

// x - value, in place.
__device__ __forceinline__ void subtract(Tile& x, Acc value, const Lane& lane) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const Acc here = lane.holds(c) ? value : Acc(0);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      x.a[c][i] -= here;
      x.b[c][i] -= here;
    }
  }
}

// x factor, in place.
__device__ __forceinline__ void scale(Tile& x, Acc factor) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      x.a[c][i] *= factor;
      x.b[c][i] *= factor;
    }
  }
}

// x y, in place.
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

// x + y, in place.
__device__ __forceinline__ void add(Tile& x, const Tile& y) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      x.a[c][i] += y.a[c][i];
      x.b[c][i] += y.b[c][i];
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
__device__ __forceinline__ void add_products(Tile& sum, const Tile& x, const Tile& y) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      sum.a[c][i] += x.a[c][i] * y.a[c][i];
      sum.b[c][i] += x.b[c][i] * y.b[c][i];
    }
  }
}
