// cos and sin of one token: which row, which entries, and the rotation itself.
#pragma once
#include "lanes.cuh"

constexpr int TABLE_ROWS = MROPE == NO_MROPE ? 1 : 3;
static_assert(!COUNTED || MROPE == NO_MROPE, "positions are counted for one row");
constexpr int TABLE_VECTOR = TABLE_BYTES / int(sizeof(Table));  // entries an access reads, all from one row
constexpr int TABLE_ENTRIES = PER_LANE ? ROTARY_DIM : ROTARY_DIM / 2;  // of a row of cos, or of sin
constexpr int TABLE_ROW_BYTES = TABLE_ENTRIES * int(sizeof(Table));

// Strides are in bytes. Without positions a row is found by (row, batch, token); with positions, read (GATHER) or counted
// within each sequence (COUNTED), the table is [max_position, entries] and `token` is the stride of a position.
struct Tables {
  const char* cos;
  const char* sin;
  long long row, batch, token;
  const char* positions;
  long long position_row, position_batch, position_token, max_position;
  const Bound* bounds;  // cu_seqlens, [sequences + 1]: the only batch entry holds sequences; null: each entry is one
  const Bound* offsets;  // [sequences], or null
  long long sequences, offset;
};

struct Token {
  long long batch, index;
};

__device__ __forceinline__ Token token_at(unsigned flat, long long sequence) {
  if (!BATCHED) return {0, flat};
  const unsigned length = unsigned(sequence);
  return {flat / length, flat % length};
}

// The tokens first, first + step, ..., found without a division a step.
struct Walk {
  unsigned flat, batch, index, step, step_batch, step_index, length;

  __device__ Walk(unsigned first, unsigned step, long long sequence)
      : flat(first), step(step), length(unsigned(sequence)) {
    batch = BATCHED ? first / length : 0;
    index = BATCHED ? first % length : first;
    step_batch = BATCHED ? step / length : 0;
    step_index = BATCHED ? step % length : step;
  }
  __device__ Token token() const { return {batch, index}; }
  __device__ void advance() {
    flat += step;
    batch += step_batch;
    index += step_index;
    if (BATCHED && index >= length) {
      index -= length;
      ++batch;
    }
  }
};

// Entries of a table: those that other sequences share stay in the L2 (KEEPS_TABLES).
template <int BYTES, int N>
__device__ __forceinline__ void load_entries(Vector<Table, N>& v, int i, const char* address, bool active,
                                             unsigned fill) {
  if constexpr (KEEPS_TABLES) load_kept<BYTES>(v, i, address, active, fill);
  else load_part<BYTES>(v, i, address, active, fill);
}

// The pair that an entry of a table belongs to.
__device__ __forceinline__ int pair_of_entry(int entry) {
  return !PER_LANE ? entry : WRITES_ADJACENT ? entry / 2 : entry % (ROTARY_DIM / 2);
}

// The row of a MRoPE table (0 = T, 1 = H, 2 = W) that pair j reads.
__device__ __forceinline__ int mrope_row(int j) {
  if (MROPE == NO_MROPE) return 0;
  if (MROPE == SECTIONED) return (j >= SECTION_T) + (j >= SECTION_T + SECTION_H);
  const int row = j % 3;
  return j < 3 * (row == 0 ? SECTION_T : row == 1 ? SECTION_H : SECTION_W) ? row : 0;
}

// Counted from the start of the token's sequence. Tokens from the last bound on count as one more sequence.
__device__ __forceinline__ long long counted_position(const Tables& tables, const Token& token) {
  long long sequence = token.batch, start = 0;
  if (tables.bounds != nullptr) {
    long long low = 0, high = tables.sequences;
    while (low < high) {
      const long long middle = (low + high) / 2;
      if (tables.bounds[middle + 1] <= token.index) low = middle + 1;
      else high = middle;
    }
    sequence = low;
    start = tables.bounds[sequence];
  }
  const bool shifted = tables.offsets != nullptr && sequence < tables.sequences;
  return token.index - start + tables.offset + (shifted ? (long long)(tables.offsets[sequence]) : 0);
}

// Where the token's rows start. A position outside the table is remembered, and nothing is read for it.
struct Rows {
  long long offset[GATHER ? TABLE_ROWS : 1];
  bool inside[GATHER ? TABLE_ROWS : 1];
  long long row_stride;

  __device__ Rows(const Tables& tables, const Token& token) : row_stride(tables.row) {
    if constexpr (COUNTED) {
      const long long position = counted_position(tables, token);
      inside[0] = position >= 0 && position < tables.max_position;
      offset[0] = position * tables.token;
    } else if constexpr (GATHER) {
#pragma unroll
      for (int row = 0; row < TABLE_ROWS; ++row) {
        const char* address = tables.positions + row * tables.position_row + token.batch * tables.position_batch +
                              token.index * tables.position_token;
        const Position position = *reinterpret_cast<const Position*>(address);
        // One unsigned comparison finds negative positions too; those of 64 unsigned bits stay what they are.
        inside[row] = (unsigned long long)(position) < (unsigned long long)(tables.max_position);
        offset[row] = (long long)(position) * tables.token;
      }
    } else {
      offset[0] = token.batch * tables.batch + token.index * tables.token;
    }
  }
  __device__ long long offset_of(int row) const {
    if constexpr (!GATHER) return offset[0] + row * row_stride;
    else if constexpr (TABLE_ROWS == 1) return offset[0];
    else return row == 0 ? offset[0] : row == 1 ? offset[1] : offset[2];
  }
  __device__ bool inside_of(int row) const {
    if constexpr (!GATHER && !COUNTED) return true;
    else if constexpr (TABLE_ROWS == 1 || COUNTED) return inside[0];
    else return row == 0 ? inside[0] : row == 1 ? inside[1] : inside[2];
  }
};

// cos and sin as they lie in memory: one entry a pair, or one a lane of the result (PER_LANE).
struct RotationRaw {
  Raw<Table> cos, sin;

  __device__ void load(const Tables& tables, const Token& token, const Lane& lane) {
    if (!ROTATES) return;
    const Rows rows(tables, token);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int slot = lane.slot_of(c);
      const bool needed = rotated(slot) && lane.holds(c);
#pragma unroll
      for (int i = 0; i < PAIRS; i += TABLE_VECTOR) {
        if (PER_LANE) {
          read(rows, tables, cos.first[c], sin.first[c], i, vector_lane(WRITE, slot, 0) - ROTARY_START + i, needed);
          read(rows, tables, cos.second[c], sin.second[c], i, vector_lane(WRITE, slot, 1) - ROTARY_START + i, needed);
        } else {
          read(rows, tables, cos.first[c], sin.first[c], i, pair_index(slot, i), needed);
        }
      }
    }
  }

  // What `load` will read, by the lanes of one head.
  __device__ static void prefetch_rows(const Tables& tables, const Token& token, const Lane& lane) {
    constexpr int ROWS = MROPE == INTERLEAVED ? TABLE_ROWS : 1, VECTORS = PER_LANE || SPLIT_PAIRS ? 2 : 1;
    const Rows rows(tables, token);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const int of_slot =
          PER_LANE ? vector_lane(WRITE, lane.slot, v) - ROTARY_START : pair_index(lane.slot, v * (PAIRS / 2));
      const int pair = pair_of_entry(of_slot);
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        const long long offset = rows.offset_of(ROWS > 1 ? row : mrope_row(pair)) +
                                 of_slot * (TABLE_LANE_STRIDE * int(sizeof(Table)));
        prefetch(tables.cos + offset);
        prefetch(tables.sin + offset);
      }
    }
  }

  // TABLE_VECTOR entries from `entry` on. A position outside the table gives NaN: the mistake shows. Slots that do not
  // exist get zeros: they take part in sums.
  __device__ void read(const Rows& rows, const Tables& tables, Vector<Table, PAIRS>& c, Vector<Table, PAIRS>& s, int i,
                       int entry, bool needed) {
    const int row = mrope_row(pair_of_entry(entry));
    const long long offset = rows.offset_of(row) + entry * (TABLE_LANE_STRIDE * int(sizeof(Table)));
    const bool inside = rows.inside_of(row);
    const unsigned fill = inside ? 0 : NAN_BITS;
    load_entries<TABLE_BYTES>(c, i, tables.cos + offset, needed && inside, fill);
    load_entries<TABLE_BYTES>(s, i, tables.sin + offset, needed && inside, fill);
  }
};

// y_a = a cos_a - b sin_a, y_b = b cos_b + a sin_b
struct Rotation {
  Tile cos, sin;

  __device__ Rotation(const RotationRaw& raw, const Lane& lane) {
    if (!ROTATES) return;
    if (PER_LANE) {
      cos = unpack(WRITE, raw.cos, lane);
      sin = unpack(WRITE, raw.sin, lane);
    } else {
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
          cos.a[c][i] = cos.b[c][i] = element(raw.cos.first[c], i);
          sin.a[c][i] = sin.b[c][i] = element(raw.sin.first[c], i);
        }
      }
    }
    if (CONJUGATE) {
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
          sin.a[c][i] = -sin.a[c][i];
          sin.b[c][i] = -sin.b[c][i];
        }
      }
    }
  }

  // R x, in place.
  __device__ void apply(Tile& x, const Lane& lane) const {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const bool here = rotated(lane.slot_of(c));
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        const Acc a = x.a[c][i], b = x.b[c][i];
        x.a[c][i] = here ? a * cos.a[c][i] - b * sin.a[c][i] : a;
        x.b[c][i] = here ? b * cos.b[c][i] + a * sin.b[c][i] : b;
      }
    }
  }

  // The transpose R' g, in place: not the opposite rotation where the two members of a pair have different entries.
  __device__ void apply_transposed(Tile& g, const Lane& lane) const {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const bool here = rotated(lane.slot_of(c));
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        const Acc a = g.a[c][i], b = g.b[c][i];
        g.a[c][i] = here ? a * cos.a[c][i] + b * sin.b[c][i] : a;
        g.b[c][i] = here ? b * cos.b[c][i] - a * sin.a[c][i] : b;
      }
    }
  }
};
