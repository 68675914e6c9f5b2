// Dot products of bytes: four unsigned weight codes of each lane's output with four signed input codes, summed exactly
// in int32. Included into the kernels of every instruction set, inside its namespace, like lanes.h.
#pragma once

#include "lanes.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace octavo {
namespace OCTAVO_ISA {
namespace {

typedef uint8_t ByteVec __attribute__((vector_size(4 * kLanes)));

ByteVec load_bytes(const uint8_t* p) { ByteVec v; memcpy(&v, p, sizeof v); return v; }
ByteVec low_halves(ByteVec packed) { return packed & 15; }
ByteVec high_halves(ByteVec packed) { return (ByteVec)((UIntVec)packed >> 4) & 15; }

// The same four input codes in every lane.
IntVec splat_codes(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, sizeof four);
  return four - IntVec{};
}

// sum + codes . inputs, codes from 0 to 15: two products fit in 16 bits.
IntVec dot_of_4_bits(IntVec sum, ByteVec codes, IntVec inputs) {
#if defined(__AVX512VNNI__)
  return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)inputs);
#elif defined(__AVX512BW__)
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, (__m512i)inputs);
  return sum + (IntVec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, (__m256i)inputs);
  return sum + (IntVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  for (int i = 0; i < 4; ++i) sum += (IntVec)((UIntVec)codes >> 8 * i & 255) * (inputs << (24 - 8 * i) >> 24);
  return sum;
#endif
}

// Where the sum of a group begins whose 8-bit codes lie around 128: with VNNI at -128 times the sum of the inputs,
// which takes the centre away for nothing; elsewhere the centre goes off the codes.
#if defined(__AVX512VNNI__)
constexpr bool kKeepsCentre = true;
#else
constexpr bool kKeepsCentre = false;
#endif

// sum + (codes - 128) . inputs, but for the centre where kKeepsCentre; codes from 1 to 255, inputs from -127 to 127.
IntVec dot_of_8_bits(IntVec sum, ByteVec codes, IntVec inputs) {
#if defined(__AVX512VNNI__)
  return dot_of_4_bits(sum, codes, inputs);
#elif defined(__AVX512BW__)
  // |w| . sign(w) a keeps two products within 16 bits, which an unsigned code up to 255 does not.
  const __m512i centred = _mm512_xor_si512((__m512i)codes, _mm512_set1_epi8(-128));
  const __mmask64 is_negative = _mm512_movepi8_mask(centred);
  const __m512i signed_inputs =
      _mm512_mask_sub_epi8((__m512i)inputs, is_negative, _mm512_setzero_si512(), (__m512i)inputs);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(centred), signed_inputs);
  return sum + (IntVec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  const __m256i centred = _mm256_xor_si256((__m256i)codes, _mm256_set1_epi8(-128));
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(centred), _mm256_sign_epi8((__m256i)inputs, centred));
  return sum + (IntVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  for (int i = 0; i < 4; ++i)
    sum += ((IntVec)((UIntVec)codes >> 8 * i & 255) - 128) * (inputs << (24 - 8 * i) >> 24);
  return sum;
#endif
}

// Half-precision floats to float32, as many as there are lanes.
FloatVec widen_halves(const uint16_t* p) {
#if defined(__AVX512F__)
  return (FloatVec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (FloatVec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  return widen(reinterpret_cast<const Float16*>(p));
#endif
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
