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

// x as it lies in memory becomes the norm's input.
__device__ __forceinline__ Tile norm_input(const Raw<In>& raw, const Rotation& rotation, const Lane& lane) {
  Tile x = unpack(READ, raw, lane);
  if (ROTATES && !NORM_FIRST) rotation.apply(x, lane);
  return x;
}
