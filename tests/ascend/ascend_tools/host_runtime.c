/* The two functions that a module lowered for the host calls and libc does not have. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

/* float to bfloat16, round to nearest even; the result is in the low bits of xmm0. NaN stays NaN. */
__m128i __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return _mm_cvtsi32_si128((bits >> 16) | 0x40);
  bits += 0x7fff + ((bits >> 16) & 1);
  return _mm_cvtsi32_si128(bits >> 16);
}

typedef struct { int64_t rank; void *descriptor; } Unranked;

/* Strided copy of any rank. Descriptor: allocated, aligned, offset, sizes[rank], strides[rank]. */
void memrefCopy(int64_t element, Unranked *source, Unranked *target) {
  int64_t rank = source->rank, count = 1;
  char *from = ((char **)source->descriptor)[1], *to = ((char **)target->descriptor)[1];
  int64_t *s = (int64_t *)source->descriptor + 2, *t = (int64_t *)target->descriptor + 2;
  for (int64_t axis = 0; axis < rank; axis++) count *= s[1 + axis];
  for (int64_t k = 0; k < count; k++) {
    int64_t a = s[0], b = t[0], rest = k;
    for (int64_t axis = rank - 1; axis >= 0; axis--) {
      int64_t index = rest % s[1 + axis];
      rest /= s[1 + axis];
      a += index * s[1 + rank + axis];
      b += index * t[1 + rank + axis];
    }
    memcpy(to + b * element, from + a * element, element);
  }
}
