// Element types, and vectors of them as they lie in registers and memory.
//
// No header of the CUDA toolkit is included: NVRTC alone compiles these files, in a fraction of the time.
#pragma once
#include "constants.cuh"

// N elements as raw 32-bit words: they are converted where they are used, so that they cost few registers until then.
template <class T, int N>
struct Vector {
  static constexpr int WORDS = (N * int(sizeof(T)) + 3) / 4;
  unsigned words[WORDS];
};

// All bits set is NaN in every element type.
constexpr unsigned NAN_BITS = 0xffffffffu;

// --- memory ---------------------------------------------------------------------------------------------------------
// The order of these loads is the order of issue: a compiler's own order was measured to be up to 9 % slower.
// `active` is a predicate inside of the instruction, not a branch.

#if IN_PLACE || __CUDA_ARCH__ >= 900
// What is written while this kernel is resident may not be read through the read-only path: what it writes itself, and
// what the launch before it writes (wait_for_the_launch_before).
#define LOAD "ld.global"
#else
#define LOAD "ld.global.nc"
#endif

// BYTES bytes at `address` become elements [i, i + BYTES / sizeof(T)) of `v`; `fill` where not active.
#define LOAD_PART(INSTRUCTION, POLICY, HINT)                                                                          \
  const int word = i * int(sizeof(T)) / 4;                                                                            \
  if constexpr (BYTES == 16) {                                                                                        \
    asm volatile(                                                                                                     \
        "{" POLICY ".reg .pred p; setp.ne.b32 p, %5, 0;\n\t"                                                          \
        "mov.b32 %0, %6; mov.b32 %1, %6; mov.b32 %2, %6; mov.b32 %3, %6;\n\t"                                         \
        "@p " INSTRUCTION ".v4.u32 {%0, %1, %2, %3}, [%4]" HINT ";}"                                                  \
        : "=&r"(v.words[word]), "=&r"(v.words[word + 1]), "=&r"(v.words[word + 2]), "=&r"(v.words[word + 3])          \
        : "l"(address), "r"(int(active)), "r"(fill) : "memory");                                                      \
  } else if constexpr (BYTES == 8) {                                                                                  \
    asm volatile(                                                                                                     \
        "{" POLICY ".reg .pred p; setp.ne.b32 p, %3, 0; mov.b32 %0, %4; mov.b32 %1, %4;\n\t"                          \
        "@p " INSTRUCTION ".v2.u32 {%0, %1}, [%2]" HINT ";}"                                                          \
        : "=&r"(v.words[word]), "=&r"(v.words[word + 1]) : "l"(address), "r"(int(active)), "r"(fill) : "memory");     \
  } else if constexpr (BYTES == 4) {                                                                                  \
    asm volatile(                                                                                                     \
        "{" POLICY ".reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, %3;\n\t"                                          \
        "@p " INSTRUCTION ".u32 %0, [%1]" HINT ";}"                                                                   \
        : "=&r"(v.words[word]) : "l"(address), "r"(int(active)), "r"(fill) : "memory");                               \
  } else {                                                                                                            \
    static_assert(BYTES == 2, "an access is 16, 8, 4 or 2 bytes wide");                                               \
    unsigned short half;                                                                                              \
    asm volatile(                                                                                                     \
        "{" POLICY ".reg .pred p; setp.ne.b32 p, %2, 0; mov.b16 %0, %3;\n\t"                                          \
        "@p " INSTRUCTION ".u16 %0, [%1]" HINT ";}"                                                                   \
        : "=&h"(half) : "l"(address), "r"(int(active)), "h"((unsigned short)(fill)) : "memory");                      \
    /* The low half of a word is written first and clears the high one. */                                            \
    v.words[word] = i % 2 ? v.words[word] | unsigned(half) << 16 : unsigned(half);                                    \
  }

template <int BYTES, class T, int N>
__device__ __forceinline__ void load_part(Vector<T, N>& v, int i, const char* address, bool active, unsigned fill) {
  LOAD_PART(LOAD, "", "")
}

// The same for what other blocks will read again: it stays in the L2 while what is read once passes through.
template <int BYTES, class T, int N>
__device__ __forceinline__ void load_kept(Vector<T, N>& v, int i, const char* address, bool active, unsigned fill) {
  LOAD_PART(LOAD ".L1::evict_last.L2::cache_hint",
            ".reg .b64 kept; createpolicy.fractional.L2::evict_last.b64 kept, 1.0;\n\t", ", kept")
}
#undef LOAD_PART

template <int BYTES, class T, int N>
__device__ __forceinline__ Vector<T, N> load(const char* address, bool active) {
  Vector<T, N> v;
#pragma unroll
  for (int i = 0; i < N; i += BYTES / int(sizeof(T))) {
    load_part<BYTES>(v, i, address + i * int(sizeof(T)), active, 0);
  }
  return v;
}

template <int BYTES, class T, int N>
__device__ __forceinline__ void store(char* address, const Vector<T, N>& v, bool active) {
  if (!active) return;
#pragma unroll
  for (int i = 0; i < N; i += BYTES / int(sizeof(T))) {
    char* p = address + i * int(sizeof(T));
    const int word = i * int(sizeof(T)) / 4;
    if constexpr (BYTES == 16) {
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                   :: "l"(p), "r"(v.words[word]), "r"(v.words[word + 1]), "r"(v.words[word + 2]),
                      "r"(v.words[word + 3]) : "memory");
    } else if constexpr (BYTES == 8) {
      asm volatile("st.global.v2.u32 [%0], {%1, %2};"
                   :: "l"(p), "r"(v.words[word]), "r"(v.words[word + 1]) : "memory");
    } else if constexpr (BYTES == 4) {
      asm volatile("st.global.u32 [%0], %1;" :: "l"(p), "r"(v.words[word]) : "memory");
    } else {
      static_assert(BYTES == 2, "an access is 16, 8, 4 or 2 bytes wide");
      asm volatile("st.global.u16 [%0], %1;"
                   :: "l"(p), "h"((unsigned short)(v.words[word] >> 16 * (i % 2))) : "memory");
    }
  }
}

// Towards the L2, where a later load will find it.
__device__ __forceinline__ void prefetch(const char* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// For exchanges in which the whole warp takes part.
constexpr unsigned ALL_LANES = 0xffffffffu;

// A launch may be set up while the one before it ends (programmatic dependent launch, sm_90 and later): all threads come
// here before they touch memory. Without that it costs nothing.
__device__ __forceinline__ void wait_for_the_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next launch may be set up from here on.
__device__ __forceinline__ void let_the_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// --- conversion -----------------------------------------------------------------------------------------------------
// Acc, the arithmetic's type, is float, or double if any input or result is double.

template <int N>
__device__ __forceinline__ Acc element(const Vector<bfloat16, N>& v, int i) {
  return __uint_as_float(i % 2 ? v.words[i / 2] & 0xffff0000u : v.words[i / 2] << 16);
}

template <int N>
__device__ __forceinline__ Acc element(const Vector<float16, N>& v, int i) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"((unsigned short)(v.words[i / 2] >> 16 * (i % 2))));
  return result;
}

template <int N>
__device__ __forceinline__ Acc element(const Vector<float, N>& v, int i) {
  return __uint_as_float(v.words[i]);
}

template <int N>
__device__ __forceinline__ Acc element(const Vector<double, N>& v, int i) {
  return Acc(__hiloint2double(v.words[2 * i + 1], v.words[2 * i]));
}

template <int N>
__device__ __forceinline__ void pack(Vector<bfloat16, N>& v, const Acc (&y)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
        : "=r"(v.words[i / 2]) : "f"(float(i + 1 < N ? y[i + 1 < N ? i + 1 : i] : Acc(0))), "f"(float(y[i])));
  }
}

template <int N>
__device__ __forceinline__ void pack(Vector<float16, N>& v, const Acc (&y)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;"
        : "=r"(v.words[i / 2]) : "f"(float(i + 1 < N ? y[i + 1 < N ? i + 1 : i] : Acc(0))), "f"(float(y[i])));
  }
}

template <int N>
__device__ __forceinline__ void pack(Vector<float, N>& v, const Acc (&y)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) v.words[i] = __float_as_uint(float(y[i]));
}

template <int N>
__device__ __forceinline__ void pack(Vector<double, N>& v, const Acc (&y)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    v.words[2 * i] = unsigned(__double2loint(double(y[i])));
    v.words[2 * i + 1] = unsigned(__double2hiint(double(y[i])));
  }
}
