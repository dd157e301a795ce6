// cos and sin of a warp's heads, loaded once and handed round in shared memory (TABLES == HANDED).
//
// All heads of a token rotate by the same entries. Loaded for each of them, a float32 table keeps the L1 busy for twice as
// long as the heads themselves do, and longer where a sectioned MRoPE row lies in three places or where neighbouring
// entries are of different rows. So the lanes of a warp load what its heads need, each other entries, TABLE_VECTOR at a
// time, and take theirs from shared memory, 16 bytes at a time.
#pragma once
#include "bulk.cuh"

constexpr bool HANDS_TABLES = TABLES == HANDED && ROTATES;

struct Handed {
  static constexpr int TABLE = HANDS_TABLES ? TABLE_ROW_BYTES : 16;  // bytes of cos
  static constexpr int VECTORS = 2 * TABLE / TABLE_BYTES, EACH = (VECTORS + 31) / 32;
  static constexpr int TOKENS = FLAT ? 2 : 1;  // of a warp
  static constexpr int VECTOR_PAIRS = SPLIT_PAIRS && !PER_LANE ? PAIRS / 2 : PAIRS;  // neighbours that a lane takes
  static_assert(!HANDS_TABLES || (TABLE % 16 == 0 && VECTOR_PAIRS * int(sizeof(Table)) % 16 == 0 && CHUNKS == 1),
                "entries are taken 16 bytes at a time");
  static_assert(!HANDS_TABLES || !FLAT || HEADS + 1 >= HEADS_PER_WARP, "a warp's heads are of two tokens at most");

  // A token's rows in shared memory: cos, then sin, and 16 bytes left out after every 128, so that lanes which take 16 of
  // 32 bytes each meet no bank twice.
  static constexpr int ROWS = 2 * TABLE + 2 * TABLE / 128 * 16, BYTES = TOKENS * ROWS;
  __device__ static int place(int byte) { return byte + byte / 128 * 16; }

  Vector<Table, TABLE_VECTOR> mine[TOKENS][EACH];

  // The rows of the warp's first or second token. All lanes come here together, with the same token.
  __device__ __forceinline__ void load(int which, const Tables& tables, const Token& token, bool needed) {
    const Rows rows(tables, token);
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      const int vector = threadIdx.x % 32 + 32 * k;
      const bool of_sin = vector >= VECTORS / 2;
      const int entry = (of_sin ? vector - VECTORS / 2 : vector) * TABLE_VECTOR, row = mrope_row(pair_of_entry(entry));
      const bool inside = rows.inside_of(row);
      const long long offset = rows.offset_of(row) + entry * (TABLE_LANE_STRIDE * int(sizeof(Table)));
      load_entries<TABLE_BYTES>(mine[which][k], 0, (of_sin ? tables.sin : tables.cos) + offset,
                                needed && inside && vector < VECTORS, inside ? 0 : NAN_BITS);
    }
  }

  // `memory`: BYTES of this warp, which is to synchronise before it takes from there.
  __device__ __forceinline__ void put(int which, unsigned memory, bool needed) const {
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      const int vector = threadIdx.x % 32 + 32 * k;
      if (!needed || vector >= VECTORS) continue;
      const unsigned to = memory + which * ROWS + place(vector * TABLE_BYTES);
      const auto& words = mine[which][k].words;
      if constexpr (TABLE_BYTES == 16) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                     ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
      } else if constexpr (TABLE_BYTES == 8) {
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(words[0]), "r"(words[1]) : "memory");
      } else if constexpr (TABLE_BYTES == 4) {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(words[0]) : "memory");
      } else {
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"((unsigned short)(words[0])) : "memory");
      }
    }
  }

  // `rows`: of this lane's token.
  __device__ static __forceinline__ void take(RotationRaw& raw, unsigned rows, const Lane& lane) {
    bulk::take_tables(raw, lane, [=](int entry) { return rows + place(entry * int(sizeof(Table))); },
                      [=](int entry) { return rows + place(TABLE + entry * int(sizeof(Table))); });
  }
};
