// The types that a KV cache holds besides those of lanes.h: int8 and float8 with a float32 scale for each head of each
// slot, and the rounding of whole vectors to a cache's type. Included like lanes.h, inside the namespace of every
// instruction set. Agrees bit for bit with kernels/kv_quant.py. Knows no attention.
#pragma once

#include "lanes.h"
#include "native.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

struct Int8 { int8_t value; };
struct Float8 { uint8_t bits; };  // E4M3: no infinities, NaN is 0x7f

typedef int8_t ByteVec __attribute__((vector_size(kLanes)));
typedef uint8_t UByteVec __attribute__((vector_size(kLanes)));

template <typename Element>
constexpr bool kIsQuantised = false;
template <>
constexpr bool kIsQuantised<Int8> = true;
template <>
constexpr bool kIsQuantised<Float8> = true;

FloatVec widen(const Int8* p) {
  ByteVec bytes;
  memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, IntVec), FloatVec);
}

FloatVec widen(const Float8* p) {
  UByteVec bytes;
  memcpy(&bytes, p, sizeof bytes);
  const UIntVec bits = __builtin_convertvector(bytes, UIntVec);
  // Moving the 4-bit exponent into the 8-bit field leaves it 120 too small; the product mends subnormals as well.
  const FloatVec magnitude = (FloatVec)((bits & 0x7fu) << 20) * 0x1p120f;
  const UIntVec nan = (UIntVec)((bits & 0x7fu) == 0x7fu) & 0x7fc00000u;
  return (FloatVec)((UIntVec)magnitude | nan | ((bits & 0x80u) << 24));
}

// ---- rounding whole vectors: to nearest, ties to even ----

void narrow_lanes(FloatVec v, float* p) { store(p, v); }

void narrow_lanes(FloatVec v, BFloat16* p) {
  const UIntVec bits = (UIntVec)v;
  const UIntVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const UIntVec is_nan = (UIntVec)(v != v);
  const HalfVec half = __builtin_convertvector((rounded & ~is_nan) | (0x7fc0u & is_nan), HalfVec);
  memcpy(p, &half, sizeof half);
}

void narrow_lanes(FloatVec v, Float16* p) {
  for (int i = 0; i < kLanes; ++i) p[i] = narrow(v[i], static_cast<Float16*>(nullptr));
}

constexpr float kRounder = 0x1.8p23f;  // adding it leaves a float32 no fraction bits

// Of numbers that the clamp of `quantise_head` has been over, which also keeps the product out of a fused add.
void narrow_lanes(FloatVec v, Int8* p) {
  const IntVec whole = (IntVec)(v + kRounder) - (IntVec)splat(kRounder);
  const ByteVec bytes = __builtin_convertvector(whole, ByteVec);
  memcpy(p, &bytes, sizeof bytes);
}

void narrow_lanes(FloatVec v, Float8* p) {
  const UIntVec sign = (UIntVec)v >> 24 & 0x80u;
  const UIntVec bits = (UIntVec)v & 0x7fffffffu;
  const UIntVec normal = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 numbers are subnormal: adding 2^14 lines the unit of the last place up with 2^-9.
  const UIntVec subnormal = (UIntVec)((FloatVec)bits + 0x1p14f) - (UIntVec)splat(0x1p14f);
  const UIntVec is_subnormal = (UIntVec)(bits < 0x3c800000u), is_nan = (UIntVec)(v != v);
  const UIntVec number = (subnormal & is_subnormal) | (normal & ~is_subnormal);
  const UByteVec bytes = __builtin_convertvector(sign | (number & ~is_nan) | (0x7fu & is_nan), UByteVec);
  memcpy(p, &bytes, sizeof bytes);
}

template <typename Element>
void narrow_up_to(FloatVec v, int64_t count, Element* p) {
  if (count >= kLanes) {
    narrow_lanes(v, p);
  } else {
    Element buffer[kLanes];
    narrow_lanes(v, buffer);
    memcpy(p, buffer, count * sizeof(Element));
  }
}

template <typename Element>
FloatVec widen_up_to(const Element* p, int64_t count) {
  return count >= kLanes ? widen(p) : widen_partial(p, count);
}

// ---- a head on its way into the cache ----

constexpr float kSmallestAbsmax = 0x1p-100f;  // MIN_ABSMAX of kv_quant.py: the reciprocal of a scale stays finite

float largest_magnitude(const Int8*) { return 127.0f; }
float largest_magnitude(const Float8*) { return 448.0f; }

// Rounds x[0, size) to out; a quantised type gets the scale of all of them, NaN where any is NaN.
template <typename Element>
void write_head(const float* x, int64_t size, Element* out, float* scale) {
  if constexpr (!kIsQuantised<Element>) {
    for (int64_t d = 0; d < size; d += kLanes) narrow_up_to(widen_up_to(x + d, size - d), size - d, out + d);
  } else {
    FloatVec top = splat(kSmallestAbsmax);
    for (int64_t d = 0; d < size; d += kLanes) {
      const FloatVec v = widen_up_to(x + d, size - d), magnitude = v < 0.0f ? -v : v;
      top = top >= magnitude ? top : (top != top ? top : magnitude);
    }
    float absmax = top[0];
    for (int i = 1; i < kLanes; ++i) absmax = absmax >= top[i] || absmax != absmax ? absmax : top[i];
    const float largest = largest_magnitude(out), multiplier = largest / absmax;
    *scale = absmax / largest;
    for (int64_t d = 0; d < size; d += kLanes) {
      const FloatVec scaled = widen_up_to(x + d, size - d) * multiplier;
      narrow_up_to(min_of(max_of(scaled, splat(-largest)), splat(largest)), size - d, out + d);
    }
  }
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
