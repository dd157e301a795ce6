// x, g and the tables of a warp's next tokens, on their way into shared memory while it computes (sm_90 and later).
//
// A warp has STAGES slots of its own, each for its heads of one token: x, then g, then (TABLES == STAGED) cos and sin. Bulk
// copies fill them; they take no registers and leave the L1 to others. One lane tells the slot's barrier how many bytes
// will come; each copy counts its own there; all lanes wait for the count, take their vectors, and the slot is filled
// again. A lane has at most one copy, the same for every token: some heads of x or of g, or a piece of a table's row.
// A sectioned MRoPE table is put together by its copies, so that a slot holds one row of it.
#pragma once
#include "stages.cuh"

constexpr bool WALKS_STAGED = STAGES > 0 && HAS_X && IN_BYTES == 16 && GRAD_BYTES == 16 && COPIES_TABLES;

struct Ring : SlotRing {
  static constexpr int X_HEAD = HEAD_DIM * int(sizeof(In)), G_HEAD = HEAD_DIM * int(sizeof(Grad));  // bytes
  static constexpr int G = HEADS_PER_WARP * X_HEAD, COS = G + HEADS_PER_WARP * G_HEAD, SIN = COS + TABLE_ROW_BYTES;
  static constexpr int SLOT = STAGED_TABLES ? SIN + TABLE_ROW_BYTES : COS, WARP = STAGES * SLOT;
  static_assert(!WALKS_STAGED || (X_HEAD % 16 == 0 && G_HEAD % 16 == 0), "what a bulk copy takes");
  static_assert(!STAGED_TABLES || MROPE != INTERLEAVED, "neighbouring entries are of different rows");

  // Copies of a token: of x, as many of g, and of either table.
  static constexpr int A_COPY = HEADS_A_COPY < HEADS_PER_WARP ? HEADS_A_COPY : HEADS_PER_WARP;
  static constexpr int RUNS = (HEADS_PER_WARP + A_COPY - 1) / A_COPY + 1;  // one more where k's heads begin
  static constexpr int PIECES = !STAGED_TABLES ? 0 : MROPE == NO_MROPE ? 1 : PER_LANE && !WRITES_ADJACENT ? 6 : 3;
  static_assert(!WALKS_STAGED || 2 * (RUNS + PIECES) <= 32, "a lane has one copy");

  LaneCopy mine;
  unsigned bytes;  // of all copies of one token

  template <class Arguments>
  __device__ Ring(const Arguments& args, const char* memory, const unsigned long long* all_barriers, int first_head)
      : SlotRing(bulk::shared_address(memory) + threadIdx.x / 32 * WARP,
                 bulk::shared_address(all_barriers) + threadIdx.x / 32 * (STAGES * bulk::BARRIER_BYTES)) {
    const int lane = threadIdx.x % 32;
    bytes = at_most(HEADS - first_head) * (X_HEAD + G_HEAD) + (SLOT - COS);
    if (lane < 2 * RUNS) {
      copies_heads(args, first_head, lane % RUNS, lane < RUNS);
    } else if (lane < 2 * (RUNS + PIECES)) {
      copies_table(args.tables, lane - 2 * RUNS);
    }
    if (lane == 0) set_up();
    __syncwarp();
  }

  // Slot `s`, which nobody reads from any more, is to hold this token.
  __device__ __forceinline__ void fill(int s, const Token& of) const {
    if (threadIdx.x % 32 == 0) bulk::expect(barrier(s), bytes);
    mine.start(of, slots + s * SLOT, barrier(s));
  }

  __device__ __forceinline__ Raw<In> x(const Lane& lane, bool active) const {
    return bulk::take_head<In>(READ, slots + stage * SLOT + lane.head * X_HEAD, lane, active);
  }
  __device__ __forceinline__ Raw<Grad> g(const Lane& lane, bool active) const {
    return bulk::take_head<Grad>(WRITE, slots + stage * SLOT + G + lane.head * G_HEAD, lane, active);
  }
  __device__ __forceinline__ void tables(RotationRaw& raw, const Lane& lane) const {
    const unsigned slot = slots + stage * SLOT;
    bulk::take_tables(raw, lane, slot + COS, slot + SIN);
  }
  // All lanes have what the slot held. Their reads are of PTX's generic proxy, the copy that fills the slot again of its
  // async proxy, and only a proxy fence orders the two: without one the copy may overtake reads that wait in the queue of
  // the multiprocessor's loads. Neither __syncwarp nor the barrier's arrival is one.
  __device__ __forceinline__ static void taken() {
    bulk::fence();
    __syncwarp();
  }

 private:
  __device__ static int at_most(int heads) { return heads < HEADS_PER_WARP ? heads : HEADS_PER_WARP; }

  // The run-th run of up to A_COPY heads of one stream that adjoin in memory.
  template <class Arguments>
  __device__ void copies_heads(const Arguments& args, int first_head, int run, bool of_x) {
    const int all = at_most(HEADS - first_head), of_q = first_head < Q_HEADS ? at_most(Q_HEADS - first_head) : 0;
    const int q_runs = (of_q + A_COPY - 1) / A_COPY;
    const int first = run < q_runs ? run * A_COPY : of_q + (run - q_runs) * A_COPY;
    const int left = (run < q_runs ? of_q : all) - first;
    if (left <= 0) return;
    const Head head(first_head + first, true);
    const Heads& heads = of_x ? (head.is_q ? args.q : args.k) : (head.is_q ? args.q_grad : args.k_grad);
    const int of_a_head = of_x ? X_HEAD : G_HEAD;
    mine.from = heads.at({0, 0}, head.of_stream, head.is_q);
    mine.batch = heads.batch;
    mine.token = heads.token;
    mine.bytes = (left < A_COPY ? left : A_COPY) * of_a_head;
    mine.to = (of_x ? 0 : G) + first * of_a_head;
  }

  // Of cos, then of sin: the row, or a section of it (twice where the row has an entry a lane, halves after halves).
  __device__ void copies_table(const Tables& tables, int piece) {
    const bool of_cos = piece < PIECES;
    const int part = of_cos ? piece : piece - PIECES, row = part % 3;
    int begin = 0, count = TABLE_ENTRIES;
    if (MROPE == SECTIONED) {
      constexpr int ENTRIES_A_PAIR = PER_LANE && WRITES_ADJACENT ? 2 : 1, REST = ROTARY_DIM / 2 - SECTION_T - SECTION_H;
      begin = (row == 0 ? 0 : row == 1 ? SECTION_T : SECTION_T + SECTION_H) * ENTRIES_A_PAIR;
      begin += part >= 3 ? ROTARY_DIM / 2 : 0;
      count = (row == 0 ? SECTION_T : row == 1 ? SECTION_H : REST) * ENTRIES_A_PAIR;
    }
    mine.from = (of_cos ? tables.cos : tables.sin) + (MROPE == SECTIONED ? row * tables.row : 0);
    mine.from += begin * int(sizeof(Table));
    mine.batch = tables.batch;
    mine.token = tables.token;
    mine.bytes = count * int(sizeof(Table));
    mine.to = (of_cos ? COS : SIN) + begin * int(sizeof(Table));
  }
};
