// The rows of sums that the blocks of a backward leave in `partial`, for sums.cuh to add up.
#pragma once
#include "norm.cuh"

constexpr int SUMS = int(NEEDS_WEIGHT) + int(NEEDS_BIAS);
// Columns of a row: q_weight, q_bias, k_weight, k_bias, those that are needed.
constexpr int Q_COLUMNS = PER_HEAD ? Q_HEADS * HEAD_DIM : HEAD_DIM;
constexpr int K_COLUMNS = K_HEADS == 0 ? 0 : PER_HEAD ? K_HEADS * HEAD_DIM : HEAD_DIM;
// Of a row, which sums.cuh takes up to 16 columns of at a time.
constexpr int PITCH = (SUMS * (Q_COLUMNS + K_COLUMNS) + 15) / 16 * 16;
