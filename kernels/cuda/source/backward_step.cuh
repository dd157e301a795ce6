// One token of a warp's heads in the backward; backward.cuh has the formulas.
#pragma once
#include "norm.cuh"
#include "streams.cuh"

constexpr int GROUPS = (HEADS + HEADS_PER_WARP - 1) / HEADS_PER_WARP;

__device__ __forceinline__ void accumulate(Tile& sum, const Tile& x, const Tile& y) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      sum.a[c][i] += x.a[c][i] * y.a[c][i];
      sum.b[c][i] += x.b[c][i] * y.b[c][i];
    }
  }
}

__device__ __forceinline__ void accumulate(Tile& sum, const Tile& x) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      sum.a[c][i] += x.a[c][i];
      sum.b[c][i] += x.b[c][i];
    }
  }
}

// Stores dx; SUMMED: adds what this token contributes to the gradients of the parameters.
template <bool SUMMED, class Arguments>
__device__ __forceinline__ void backward_step(const Arguments& args, unsigned flat, const Head& head, const Lane& lane,
                                              const Raw<Param>& weight, bool stores, Tile& dweight, Tile& dbias) {
  const Token token = token_at(flat, args.sequence);
  RotationRaw tables;
  if (TABLES_FIRST) tables.load(args.tables, token, lane);
  Raw<In> x;
  if (HAS_X) x = load_head<IN_BYTES, In>(READ, head.at(args.q, args.k, token), lane, head.exists);
  const char* const gradient = head.at(args.q_grad, args.k_grad, token);
  const Raw<Grad> raw = load_head<GRAD_BYTES, Grad>(WRITE, gradient, lane, head.exists);
  if (!TABLES_FIRST) tables.load(args.tables, token, lane);

  const Rotation rotation(tables, lane);
  Tile g = unpack(WRITE, raw, lane);
  if (ROTATES && NORM_FIRST) rotation.apply_transposed(g, lane);
  if (NORMALISES) {
    Tile xhat = unpack(READ, x, lane);
    if (ROTATES && !NORM_FIRST) rotation.apply(xhat, lane);
    const Acc r = standardise(xhat, args.eps, lane);
    if (SUMMED && NEEDS_WEIGHT) accumulate(dweight, g, xhat);
    if (SUMMED && NEEDS_BIAS) accumulate(dbias, g);
    norm_backward(g, xhat, r, weight, lane);
  }
  if (ROTATES && !NORM_FIRST) rotation.apply_transposed(g, lane);
  store_head<DX_BYTES>(READ, head.at(args.dq, args.dk, token), lane, pack_tile<In>(READ, g, lane), stores);
}
