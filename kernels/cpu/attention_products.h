// The two products of attention, register-blocked with vectors along the fast axis, over float32 terms or over pairs of
// bfloat16 (two terms of the sum at once, one instruction). Included by attention_tile.cpp alone, inside its namespace.
// Every row is summed in the same order, whatever its company. Knows no caches and no softmax.
#pragma once

#include "lanes.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// Two bfloat16 that are consecutive along a sum, the first in the low half.
struct BFloat16Pair { uint32_t bits; };

FloatVec load_line(const float* p) { return load(p); }
FloatVec spread(float x) { return splat(x); }
FloatVec add_products(FloatVec sum, FloatVec factor, FloatVec line) { return sum + factor * line; }

#if defined(__AVX512BF16__)
IntVec load_line(const BFloat16Pair* p) { IntVec v; memcpy(&v, p, sizeof v); return v; }
IntVec spread(BFloat16Pair x) { return (IntVec)_mm512_set1_epi32(static_cast<int>(x.bits)); }
FloatVec add_products(FloatVec sum, IntVec factor, IntVec line) {
  return (FloatVec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)factor, (__m512bh)line);
}
#endif

constexpr int kRowsPerBlock = 4;
constexpr int kVectorsPerBlock = kLanes == 16 ? 4 : 2;  // 4 x 4 accumulators of 32 registers, 4 x 2 of 16

// c[Rows, Vectors * lanes] (+)= a[Rows, depth] * b[depth, Vectors * lanes], accumulators in registers.
template <int Rows, int Vectors, typename Term>
void multiply_block(const Term* a, int64_t lda, const Term* b, int64_t ldb, float* c, int64_t ldc, int64_t depth,
                    bool accumulate) {
  FloatVec sum[Rows][Vectors];
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v) sum[r][v] = accumulate ? load(c + r * ldc + v * kLanes) : FloatVec{};
  for (int64_t k = 0; k < depth; ++k) {
    decltype(load_line(b)) line[Vectors];
    for (int v = 0; v < Vectors; ++v) line[v] = load_line(b + k * ldb + v * kLanes);
    for (int r = 0; r < Rows; ++r) {
      const auto factor = spread(a[r * lda + k]);
      for (int v = 0; v < Vectors; ++v) sum[r][v] = add_products(sum[r][v], factor, line[v]);
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v) store(c + r * ldc + v * kLanes, sum[r][v]);
}

template <int Vectors, typename Term>
void multiply_columns(const Term* a, int64_t lda, const Term* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
                      int64_t depth, bool accumulate) {
  int64_t r = 0;
  for (; r + kRowsPerBlock <= rows; r += kRowsPerBlock)
    multiply_block<kRowsPerBlock, Vectors>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, depth, accumulate);
  a += r * lda;
  c += r * ldc;
  switch (rows - r) {
    case 3: multiply_block<3, Vectors>(a, lda, b, ldb, c, ldc, depth, accumulate); break;
    case 2: multiply_block<2, Vectors>(a, lda, b, ldb, c, ldc, depth, accumulate); break;
    case 1: multiply_block<1, Vectors>(a, lda, b, ldb, c, ldc, depth, accumulate); break;
  }
}

// c[rows, columns] (+)= a[rows, depth] * b[depth, columns]; columns is a multiple of the lanes.
template <typename Term>
void multiply(const Term* a, int64_t lda, const Term* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
              int64_t columns, int64_t depth, bool accumulate) {
  constexpr int64_t step = kVectorsPerBlock * kLanes;
  int64_t n = 0;
  for (; n + step <= columns; n += step)
    multiply_columns<kVectorsPerBlock>(a, lda, b + n, ldb, c + n, ldc, rows, depth, accumulate);
  for (; n < columns; n += kLanes) multiply_columns<1>(a, lda, b + n, ldb, c + n, ldc, rows, depth, accumulate);
}

// ---- weights ----

// 2^x for x <= 128: exactly 0 for -inf, NaN for NaN. Minimax polynomials on [-0.5, 0.5], exactly 1 at 0: the relative
// error is below 3e-7, or 3e-6 where the weight is rounded to bfloat16 next.
template <bool IsRounded>
FloatVec exp2_weights(FloatVec x) {
#if defined(__AVX512F__)
  const FloatVec whole = (FloatVec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const FloatVec f = x == kNegativeInfinity ? FloatVec{} : x - whole;
#else
  const FloatVec clamped = min_of(max_of(x, splat(-127.0f)), splat(127.0f));
  const FloatVec shifted = clamped + 0x1.8p23f;  // the sum's last bits are the nearest integer
  const IntVec exponent = (IntVec)shifted - (IntVec)splat(0x1.8p23f);
  const FloatVec f = clamped - (shifted - 0x1.8p23f);
#endif
  FloatVec sum;
  if constexpr (IsRounded) {
    sum = splat(9.582852944731712e-3f);
    sum = sum * f + 5.5906426161527634e-2f;
    sum = sum * f + 2.4024099111557007e-1f;
    sum = sum * f + 6.931241750717163e-1f;
  } else {
    sum = splat(1.326472731307149e-3f);
    sum = sum * f + 9.671512991189957e-3f;
    sum = sum * f + 5.550733581185341e-2f;
    sum = sum * f + 2.4022242426872253e-1f;
    sum = sum * f + 6.931470036506653e-1f;
  }
  sum = sum * f + 1.0f;
#if defined(__AVX512F__)
  return (FloatVec)_mm512_scalef_ps((__m512)sum, (__m512)whole);
#else
  const FloatVec power = sum * (FloatVec)((exponent + 127) << 23);
  return x < -126.0f ? FloatVec{} : (x == x ? power : x);
#endif
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
