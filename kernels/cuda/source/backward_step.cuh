// One token of a warp's heads in the backward; backward.cuh has the formulas.
#pragma once
#include "norm.cuh"
#include "streams.cuh"

constexpr int GROUPS = (HEADS + HEADS_PER_WARP - 1) / HEADS_PER_WARP;

// From x and g as they lie in memory to dx, stored at `out`; SUMMED: adds what this token contributes to the gradients of
// the parameters. `rotated` is called where the tables have been used.
template <bool SUMMED, class Rotated>
__device__ __forceinline__ void backward_head(const Raw<In>& raw_x, const Raw<Grad>& raw_g, const RotationRaw& tables,
                                              const Raw<Param>& weight, double eps, char* out, bool stores,
                                              const Lane& lane, Tile& dweight, Tile& dbias, const Rotated& rotated) {
  const Rotation rotation(tables, lane);
  Tile g = unpack(WRITE, raw_g, lane);
  if (ROTATES && NORM_FIRST) rotation.apply_transposed(g, lane);
  if (NORM_FIRST) rotated();
  if (NORMALISES) {
    Tile x = unpack(READ, raw_x, lane);
    if (ROTATES && !NORM_FIRST) rotation.apply(x, lane);
    if (SUMMED && NEEDS_BIAS) add(dbias, g);
    norm_backward(g, x, eps, weight, lane, [&] {
      if (SUMMED && NEEDS_WEIGHT) add_products(dweight, g, x);
    });
  }
  if (ROTATES && !NORM_FIRST) rotation.apply_transposed(g, lane);
  if (!NORM_FIRST) rotated();
  store_head<DX_BYTES>(READ, out, lane, pack_tile<In>(READ, g, lane), stores);
}

// The same from memory to memory.
template <bool SUMMED, class Arguments>
__device__ __forceinline__ void backward_step(const Arguments& args, unsigned flat, const Head& head, const Lane& lane,
                                              const Raw<Param>& weight, bool stores, Tile& dweight, Tile& dbias) {
  const Token token = token_at(flat, args.sequence);
  RotationRaw tables;
  if (TABLES == FIRST) tables.load(args.tables, token, lane);
  Raw<In> x;
  if (HAS_X) x = load_head<IN_BYTES, In>(READ, head.at(args.q, args.k, token), lane, head.exists);
  const char* const gradient = head.at(args.q_grad, args.k_grad, token);
  const Raw<Grad> g = load_head<GRAD_BYTES, Grad>(WRITE, gradient, lane, head.exists);
  if (TABLES != FIRST) tables.load(args.tables, token, lane);
  char* const out = head.at(args.dq, args.dk, token);
  backward_head<SUMMED>(x, g, tables, weight, args.eps, out, stores, lane, dweight, dbias, [] {});
}
