// RMSNorm and LayerNorm of one head: forward, and the gradient of the norm's input.
#pragma once
#include "lanes.cuh"

constexpr bool NORMALISES = NORM != NO_NORM;
// A norm before the rotation has its weight on the input's lanes, one after it on the result's.
constexpr Side NORM_SIDE = NORM_FIRST ? READ : WRITE;

// Weight or bias of one head; [HEAD_DIM], or one row a head (PER_HEAD).
__device__ __forceinline__ Raw<Param> load_parameter(const char* parameter, int head_of_stream, const Lane& lane,
                                                     bool active) {
  const long long row = PER_HEAD ? head_of_stream * (HEAD_DIM * int(sizeof(Param))) : 0;
  return load_head<PARAM_BYTES, Param>(NORM_SIDE, parameter + row, lane, active);
}

__device__ __forceinline__ Tile unpack_weight(const Raw<Param>& raw, const Lane& lane) {
  Tile w = unpack(NORM_SIDE, raw, lane);
  if (NORM == RMS_ONE_PLUS) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        w.a[c][i] += 1;
        w.b[c][i] += 1;
      }
    }
  }
  return w;
}

// Sum of x y over the lanes of the head.
__device__ __forceinline__ Acc dot(const Tile& x, const Tile& y, const Lane& lane) {
  Acc total = 0;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      total += x.a[c][i] * y.a[c][i];
      total += x.b[c][i] * y.b[c][i];
    }
  }
  return head_sum(total, lane);
}

__device__ __forceinline__ Acc mean(const Tile& x, const Lane& lane) {
  Acc total = 0;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) total += x.a[c][i] + x.b[c][i];
  }
  return head_sum(total, lane) * Acc(1.0 / HEAD_DIM);
}

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

__device__ __forceinline__ float reciprocal_root(float x) { return rsqrtf(x); }
__device__ __forceinline__ double reciprocal_root(double x) { return rsqrt(x); }

// r = 1 / sqrt(mean(x^2) + eps). LayerNorm: of x - mean(x), which x becomes.
__device__ __forceinline__ Acc reciprocal_deviation(Tile& x, double eps, const Lane& lane) {
  if (NORM == LAYER) subtract(x, mean(x, lane), lane);
  return reciprocal_root(dot(x, x, lane) * Acc(1.0 / HEAD_DIM) + Acc(eps));
}

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

// x becomes xhat = x r.
__device__ __forceinline__ void standardise(Tile& x, double eps, const Lane& lane) {
  scale(x, reciprocal_deviation(x, eps, lane));
}

// xhat w + b, in place.
__device__ __forceinline__ void scale_and_shift(Tile& x, const Raw<Param>& weight, const Raw<Param>& bias,
                                                const Lane& lane) {
  if (HAS_WEIGHT) {
    const Tile w = unpack_weight(weight, lane);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        x.a[c][i] *= w.a[c][i];
        x.b[c][i] *= w.b[c][i];
      }
    }
  }
  if (HAS_BIAS) {
    const Tile b = unpack(NORM_SIDE, bias, lane);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        x.a[c][i] += b.a[c][i];
        x.b[c][i] += b.b[c][i];
      }
    }
  }
}

// Given r g and x (LayerNorm: x - mean(x)), r g becomes the gradient of the norm's input: with u = r g w it is
// u - x r^2 mean(u x); LayerNorm: that less mean(u). So neither xhat nor g is needed, which saves a product a lane.
__device__ __forceinline__ void norm_backward(Tile& g, const Tile& x, Acc r, const Raw<Param>& weight, const Lane& lane) {
  if (HAS_WEIGHT) {
    const Tile w = unpack_weight(weight, lane);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        g.a[c][i] *= w.a[c][i];
        g.b[c][i] *= w.b[c][i];
      }
    }
  }
  const Acc projection = dot(g, x, lane) * Acc(1.0 / HEAD_DIM) * r * r;
  if (NORM == LAYER) subtract(g, mean(g, lane), lane);
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      g.a[c][i] -= x.a[c][i] * projection;
      g.b[c][i] -= x.b[c][i] * projection;
    }
  }
}
