// RMSNorm and LayerNorm of one head: forward, and the gradient of the norm's input.
#pragma once
#include "arithmetic.cuh"

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

// Mean over the lanes of the head, of which a thread has added up its own.
__device__ __forceinline__ Acc head_mean(Acc sum, const Lane& lane) {
  return head_sum(sum, lane) * Acc(1.0 / HEAD_DIM);
}

__device__ __forceinline__ float reciprocal_root(float x) { return rsqrtf(x); }
__device__ __forceinline__ double reciprocal_root(double x) { return rsqrt(x); }

// r = 1 / sqrt(mean(x^2) + eps). LayerNorm: of x - mean(x), which x becomes.
__device__ __forceinline__ Acc reciprocal_deviation(Tile& x, double eps, const Lane& lane) {
  if (NORM == LAYER) subtract(x, head_mean(sum_of(x), lane), lane);
  return reciprocal_root(head_mean(sum_of(x, x), lane) + Acc(eps));
}

// x becomes xhat = x r.
__device__ __forceinline__ void standardise(Tile& x, double eps, const Lane& lane) {
  scale(x, reciprocal_deviation(x, eps, lane));
}

// xhat w + b, in place.
__device__ __forceinline__ void scale_and_shift(Tile& x, const Raw<Param>& weight, const Raw<Param>& bias,
                                                const Lane& lane) {
  if (HAS_WEIGHT) multiply(x, unpack_weight(weight, lane));
  if (HAS_BIAS) add(x, unpack(NORM_SIDE, bias, lane));
}

// g becomes the gradient of the norm's input x (which becomes x - mean(x) for LayerNorm): with u = g w it is
// r u - x r^3 mean(u x); LayerNorm: that less r mean(u). All these sums need no r, so their exchanges overlap.
// `scaled` is called where g is r g and x is what xhat is r times of.
template <class Scaled>
__device__ __forceinline__ void norm_backward(Tile& g, Tile& x, double eps, const Raw<Param>& weight, const Lane& lane,
                                              const Scaled& scaled) {
  if (NORM == LAYER) subtract(x, head_mean(sum_of(x), lane), lane);
  Tile w;
  if (HAS_WEIGHT) w = unpack_weight(weight, lane);
  Acc squares = 0, products = 0, total = 0;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const Acc a = HAS_WEIGHT ? g.a[c][i] * w.a[c][i] : g.a[c][i], b = HAS_WEIGHT ? g.b[c][i] * w.b[c][i] : g.b[c][i];
      squares += x.a[c][i] * x.a[c][i];
      squares += x.b[c][i] * x.b[c][i];
      products += a * x.a[c][i];
      products += b * x.b[c][i];
      total += a + b;
    }
  }
  const Acc r = reciprocal_root(head_mean(squares, lane) + Acc(eps));
  const Acc projection = head_mean(products, lane) * r * r * r;
  const Acc mean_u = NORM == LAYER ? head_mean(total, lane) * r : Acc(0);
  scale(g, r);
  scaled();
  if (HAS_WEIGHT) multiply(g, w);
  add_scaled(g, x, -projection);
  if (NORM == LAYER) subtract(g, mean_u, lane);
}
