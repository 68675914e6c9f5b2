// Vectors of as many float32 lanes as the instruction set has: loads that convert, elementary functions, a transpose.
// Included into the kernels of every instruction set, inside its namespace: everything here has internal linkage, so
// that no code of one instruction set can be linked into another. Knows no attention and no model.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace octavo {
namespace OCTAVO_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float FloatVec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UIntVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));

constexpr float kNegativeInfinity = -__builtin_inff();
constexpr float kLog2E = 1.4426950408889634f;

int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

FloatVec load(const float* p) { FloatVec v; memcpy(&v, p, sizeof v); return v; }
void store(float* p, FloatVec v) { memcpy(p, &v, sizeof v); }
FloatVec splat(float x) { return x - FloatVec{}; }  // x - 0 keeps the sign of -0, which x + 0 does not
FloatVec max_of(FloatVec a, FloatVec b) { return a > b ? a : b; }
IntVec max_of(IntVec a, IntVec b) { return a > b ? a : b; }
FloatVec min_of(FloatVec a, FloatVec b) { return a < b ? a : b; }

// ---- reductions over the lanes, as a tree of halves ----

template <int Step, typename Vec, int... Lane>
Vec exchange_lanes(Vec v, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(v, v, (Lane ^ Step)...);
}

template <int Step, typename Vec>
Vec exchange_lanes(Vec v) {
  return exchange_lanes<Step>(v, std::make_integer_sequence<int, kLanes>{});
}

template <typename Vec>
auto lane_sum(Vec v) {
  if constexpr (kLanes > 8) v += exchange_lanes<8>(v);
  if constexpr (kLanes > 4) v += exchange_lanes<4>(v);
  v += exchange_lanes<2>(v);
  v += exchange_lanes<1>(v);
  return v[0];
}

// In every lane.
template <typename Vec>
Vec largest_lane(Vec v) {
  if constexpr (kLanes > 8) v = max_of(v, exchange_lanes<8>(v));
  if constexpr (kLanes > 4) v = max_of(v, exchange_lanes<4>(v));
  v = max_of(v, exchange_lanes<2>(v));
  return max_of(v, exchange_lanes<1>(v));
}

float lane_max(FloatVec v) { return largest_lane(v)[0]; }

// ---- element types of the query and the cache, converted to float32 on load ----

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

FloatVec widen(const float* p) { return load(p); }

FloatVec widen(const BFloat16* p) {
  HalfVec half;
  memcpy(&half, p, sizeof half);
  return (FloatVec)(__builtin_convertvector(half, UIntVec) << 16);
}

FloatVec widen(const Float16* p) {
  HalfVec half;
  memcpy(&half, p, sizeof half);
  const UIntVec bits = __builtin_convertvector(half, UIntVec);
  // Moving the 5-bit exponent into the 8-bit field leaves it 112 too small; the product mends subnormals as well.
  const FloatVec magnitude = (FloatVec)((bits & 0x7fffu) << 13) * 0x1p112f;
  const UIntVec special = (UIntVec)((bits & 0x7c00u) == 0x7c00u) & 0x7f800000u;  // infinities and NaN
  return (FloatVec)((UIntVec)magnitude | special | ((bits & 0x8000u) << 16));
}

float widen_one(float x) { return x; }

template <typename Element>
float widen_one(Element x) {
  Element lanes[kLanes] = {x};
  return widen(lanes)[0];
}

// `count` elements, then zeros.
template <typename Element>
FloatVec widen_partial(const Element* p, int64_t count) {
  Element buffer[kLanes] = {};
  memcpy(buffer, p, count * sizeof(Element));
  return widen(buffer);
}

float narrow(float x, float*) { return x; }

BFloat16 narrow(float x, BFloat16*) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fc0};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};  // to nearest, ties to even
}

Float16 narrow(float x, Float16*) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (bits >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to 65536 or more
  if (bits < 0x38800000u) {  // subnormal: adding 0.5 lines the unit of the last place up with 2^-24
    float magnitude;
    memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude += 0.5f;
    memcpy(&bits, &magnitude, sizeof bits);
    return {static_cast<uint16_t>(sign | (bits - 0x3f000000u))};
  }
  bits += 0xfffu + ((bits >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((bits - (112u << 23)) >> 13))};
}

// ---- elementary functions ----

// 2^x, relative error below 2e-7; exactly 0 below -126 (-inf included), saturates above 127.
FloatVec exp2_lanes(FloatVec x) {
  const FloatVec clamped = min_of(max_of(x, splat(-127.0f)), splat(127.0f));
  const FloatVec shifted = clamped + 0x1.8p23f;  // the sum's last bits are the nearest integer
  const IntVec exponent = (IntVec)shifted - (IntVec)splat(0x1.8p23f);
  const FloatVec f = clamped - (shifted - 0x1.8p23f);  // in [-0.5, 0.5]
  // Taylor series of 2^f: coefficients ln(2)^k / k!; the first one left out is below 6e-9 there.
  FloatVec sum = splat(1.5252734e-5f);
  sum = sum * f + 1.5403530e-4f;
  sum = sum * f + 1.3333558e-3f;
  sum = sum * f + 9.6181291e-3f;
  sum = sum * f + 5.5504109e-2f;
  sum = sum * f + 2.4022651e-1f;
  sum = sum * f + 6.9314718e-1f;
  sum = sum * f + 1.0f;
  const FloatVec power = (FloatVec)((exponent + 127) << 23);
  return x < -126.0f ? FloatVec{} : sum * power;
}

// tanh(x), relative error below 3e-7, saturates at +-1. A form without exponentials near 0, where 1 - e^-2x would cancel.
FloatVec tanh_lanes(FloatVec x) {
  const FloatVec magnitude = x < 0.0f ? -x : x;
  const FloatVec far = 1.0f - 2.0f / (exp2_lanes(magnitude * (2.0f * kLog2E)) + 1.0f);
  const FloatVec square = x * x;  // odd polynomial in x, fitted at the Chebyshev nodes of [0, 0.625]
  FloatVec near = splat(-5.66478e-3f);
  near = near * square + 2.059568e-2f;
  near = near * square - 5.372268e-2f;
  near = near * square + 1.333115e-1f;
  near = near * square - 3.3333263e-1f;
  near = near * square + 1.0f;
  return magnitude >= 0.625f ? (x < 0.0f ? -far : far) : near * x;  // NaN stays NaN
}

// ---- transpose and sums across lanes ----

constexpr int lower_source(int step, int lane) { return lane & step ? kLanes + lane - step : lane; }
constexpr int upper_source(int step, int lane) { return lane & step ? kLanes + lane : lane + step; }

// One stage of a butterfly: swaps the off-diagonal step x step squares of every 2 step x 2 step square.
template <int Step, int... Lane>
void transpose_stage(FloatVec (&rows)[kLanes], std::integer_sequence<int, Lane...>) {
  for (int i = 0; i < kLanes; ++i) {
    if (i & Step) continue;
    const FloatVec low = rows[i], high = rows[i + Step];
    rows[i] = __builtin_shufflevector(low, high, lower_source(Step, Lane)...);
    rows[i + Step] = __builtin_shufflevector(low, high, upper_source(Step, Lane)...);
  }
}

void transpose(FloatVec (&rows)[kLanes]) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
  transpose_stage<1>(rows, lanes);
  transpose_stage<2>(rows, lanes);
  if constexpr (kLanes > 4) transpose_stage<4>(rows, lanes);
  if constexpr (kLanes > 8) transpose_stage<8>(rows, lanes);
}

// The same butterfly, adding the two halves instead of keeping them: `rows` that differ in the bit `Step` become one.
template <int Step, int... Lane>
void add_stage(FloatVec (&rows)[kLanes], std::integer_sequence<int, Lane...>) {
  for (int i = 0; i < kLanes; i += 2 * Step)
    rows[i] = __builtin_shufflevector(rows[i], rows[i + Step], lower_source(Step, Lane)...) +
              __builtin_shufflevector(rows[i], rows[i + Step], upper_source(Step, Lane)...);
}

// Lane i of the result is the sum of the lanes of rows[i], added as a tree, neighbours first: the same for every i.
FloatVec lane_sums(FloatVec (&rows)[kLanes]) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
  add_stage<1>(rows, lanes);
  add_stage<2>(rows, lanes);
  if constexpr (kLanes > 4) add_stage<4>(rows, lanes);
  if constexpr (kLanes > 8) add_stage<8>(rows, lanes);
  return rows[0];
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
