// What an instance is written with: types and constants that kernels/cuda/instance.py generates before the include of a
// kernel. reduce.cuh has those of the last two groups only.
//
// types        In, Out, Grad, Table, Param: elements of x, of the result, of its gradient, of cos and sin, of weights and
//              biases; Acc: of the arithmetic; Position, Bound: integers of positions, of cu_seqlens and offsets
// heads        Q_HEADS, K_HEADS, V_HEADS (moved by this launch); GROUP: q heads that follow each other in grouped packing,
//              0 in others
// lanes        HEAD_DIM; ROTARY_DIM of them from ROTARY_START on are rotated; PAIRS, CHUNKS, SPLIT_PAIRS: how a head is cut
//              into slots (lanes.cuh)
// formula      NORM, NORM_FIRST: before the rotation; HIDDEN: over the row; ROTATES, READS_ADJACENT, WRITES_ADJACENT:
//              where a pair stands in x and in the result; CONJUGATE: by the opposite angle; TRANSPOSED: the forward's
//              kernel as the backward of a rotation alone
// tables       PER_LANE: an entry a lane, not a pair; MROPE, SECTION_T, SECTION_H, SECTION_W: of pairs; GATHER: by
//              positions; COUNTED: by counted ones; TABLE_LANE_STRIDE: between entries; KEEPS_TABLES: in the L2
// tokens       BATCHED: a token is found by its sequence and its place there, because some tensor's sequences do not follow
//              each other in memory as their tokens do
// parameters   HAS_WEIGHT, HAS_BIAS, PER_HEAD: one row a head; in a backward HAS_X: x is read, NEEDS_WEIGHT, NEEDS_BIAS:
//              their gradients are asked for, DEFERS: dx of the last tokens is left to reduce_and_finish.cuh
// tile         WARPS a block, BLOCKS a multiprocessor, UNROLL, FLAT, TABLES, STAGES, HEADS_A_COPY, PREFETCHES_HEADS,
//              PREFETCHES_TABLES: kernels/cuda/tiles.py says what each means
// accesses     IN_BYTES, OUT_BYTES, GRAD_BYTES, DX_BYTES, TABLE_BYTES, PARAM_BYTES, MOVE_BYTES (of v's results): bytes of
//              the widest access that strides and addresses allow
// sums         SUM_THREADS of a block of sums.cuh
// all kernels  Acc, Param, IN_PLACE (a macro): what is read may be written meanwhile; ARGUMENT_WORDS: 64-bit words of the
//              kernel's argument
#pragma once

struct bfloat16 { unsigned short bits; };
struct float16 { unsigned short bits; };

enum Norm { NO_NORM, RMS, RMS_ONE_PLUS, LAYER };
enum Mrope { NO_MROPE, SECTIONED, INTERLEAVED };
// cos and sin are loaded: after x and g, before them, a token early, by copies as x and g are, by the warp for all its
// heads.
enum When { LAST, FIRST, AHEAD, STAGED, HANDED };
