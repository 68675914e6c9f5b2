// Attention of one query tile over one sequence's blocks, in float32, with an online softmax (FlashAttention, Dao et
// al. 2022, algorithm 1). Compiled once per instruction set, each into its own namespace (-DOCTAVO_ISA=...), so it uses
// nothing of the standard library that could be emitted as a shared inline function. Knows no threads and no batch.
//
// A tile of keys is transposed into scratch, so that both products are the same register-blocked product with vectors
// along the fast axis: scores[row, key] = q[row, d] * kT[d, key], out[row, d] += p[row, key] * v[key, d].
// Tile boundaries are absolute positions and every row is reduced in the same order whatever else is in the tile:
// a token's output does not depend on how its prompt was cut into chunks.
#include <cstdint>
#include <cstring>
#include <utility>

#include "paged_attention.h"

#ifndef OCTAVO_ISA
#define OCTAVO_ISA generic
#endif

namespace octavo {
namespace OCTAVO_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kVectorsPerBlock = 4;  // 4 x 4 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kVectorsPerBlock = 2;  // 4 x 2 accumulators of 16 registers
#else
constexpr int kLanes = 4;
constexpr int kVectorsPerBlock = 2;
#endif
constexpr int kRowsPerBlock = 4;

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
FloatVec min_of(FloatVec a, FloatVec b) { return a < b ? a : b; }
float lane_sum(FloatVec v) { float s = 0; for (int i = 0; i < kLanes; ++i) s += v[i]; return s; }
float lane_max(FloatVec v) { float m = v[0]; for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m; return m; }

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
  return magnitude < 0.625f ? near * x : (x < 0.0f ? -far : far);
}

// ---- products ----

// c[Rows, Vectors * lanes] (+)= a[Rows, depth] * b[depth, Vectors * lanes], accumulators in registers.
template <int Rows, int Vectors>
void multiply_block(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t depth,
                    bool accumulate) {
  FloatVec sum[Rows][Vectors];
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v) sum[r][v] = accumulate ? load(c + r * ldc + v * kLanes) : FloatVec{};
  for (int64_t k = 0; k < depth; ++k) {
    FloatVec line[Vectors];
    for (int v = 0; v < Vectors; ++v) line[v] = load(b + k * ldb + v * kLanes);
    for (int r = 0; r < Rows; ++r) {
      const FloatVec factor = splat(a[r * lda + k]);
      for (int v = 0; v < Vectors; ++v) sum[r][v] += factor * line[v];
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v) store(c + r * ldc + v * kLanes, sum[r][v]);
}

template <int Vectors>
void multiply_columns(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
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
void multiply(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
              int64_t columns, int64_t depth, bool accumulate) {
  constexpr int64_t step = kVectorsPerBlock * kLanes;
  int64_t n = 0;
  for (; n + step <= columns; n += step)
    multiply_columns<kVectorsPerBlock>(a, lda, b + n, ldb, c + n, ldc, rows, depth, accumulate);
  for (; n < columns; n += kLanes) multiply_columns<1>(a, lda, b + n, ldb, c + n, ldc, rows, depth, accumulate);
}

// ---- packing a tile of keys and values ----

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

// Where the keys and values of up to kKeysPerTile consecutive positions lie. Positions that no query of the task sees
// stay null: their table entries and slots are never trusted.
template <typename Element>
struct TileRows {
  const Element* key[kKeysPerTile];
  const Element* value[kKeysPerTile];
  int64_t count = 0;

  void locate(const AttendArgs& args, const TileTask& task, int64_t begin, int64_t first_key, int64_t end) {
    count = max_of(0, min_of(kKeysPerTile, end - begin));
    const int32_t* table = args.block_tables + task.row * args.block_tables_stride;
    for (int64_t n = 0; n < count; ++n) {
      key[n] = nullptr;
      value[n] = nullptr;
      if (begin + n < first_key) continue;
      const int64_t position = begin + n, slot = position % args.block_size;
      const int64_t block = table[position / args.block_size];
      const int64_t* ks = args.key_cache_strides;
      const int64_t* vs = args.value_cache_strides;
      key[n] = static_cast<const Element*>(args.key_cache) + block * ks[0] + task.kv_head * ks[1] + slot * ks[2];
      value[n] = static_cast<const Element*>(args.value_cache) + block * vs[0] + task.kv_head * vs[1] + slot * vs[2];
    }
  }
};

// Fetches the cache lines of p[0, count), one of the next tile's rows: blocks lie scattered over pages, which the
// hardware prefetchers do not cross. A null row has none.
template <typename Element>
void prefetch(const Element* p, int64_t count) {
  for (int64_t d = 0; p && d < count; d += 64 / static_cast<int64_t>(sizeof(Element))) __builtin_prefetch(p + d);
}

// keys[d, n] = key of position n; columns without a key are zero.
template <typename Element>
void pack_keys(const TileRows<Element>& tile, const TileRows<Element>& next, int64_t head_dim, float* keys) {
  for (int64_t n = 0; n < kKeysPerTile; n += kLanes) {
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      const int64_t width = min_of(kLanes, head_dim - d);
      FloatVec square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        if (n + i < next.count && next.key[n + i]) prefetch(next.key[n + i] + d, width);
        if (n + i >= tile.count || !tile.key[n + i]) square[i] = FloatVec{};
        else if (width == kLanes) square[i] = widen(tile.key[n + i] + d);
        else square[i] = widen_partial(tile.key[n + i] + d, width);
      }
      transpose(square);
      for (int64_t i = 0; i < width; ++i) store(keys + (d + i) * kKeysPerTile + n, square[i]);
    }
  }
}

// values[n, d]; rows without a value and columns past head_dim are zero.
template <typename Element>
void pack_values(const TileRows<Element>& tile, const TileRows<Element>& next, int64_t head_dim, int64_t padded_dim,
                 float* values) {
  for (int64_t n = 0; n < tile.count; ++n) {
    if (n < next.count) prefetch(next.value[n], head_dim);
    const Element* source = tile.value[n];
    float* target = values + n * padded_dim;
    for (int64_t d = 0; d < padded_dim; d += kLanes) {
      if (!source) store(target + d, FloatVec{});
      else if (d + kLanes <= head_dim) store(target + d, widen(source + d));
      else store(target + d, widen_partial(source + d, head_dim - d));
    }
  }
}

// ---- one query tile ----

struct Scratch {
  float *query, *scores, *out, *row_max, *row_sum, *keys, *values;

  Scratch(float* base, int64_t rows, int64_t padded_dim) {
    keys = base;
    values = keys + padded_dim * kKeysPerTile;
    query = values + padded_dim * kKeysPerTile;
    out = query + rows * padded_dim;
    scores = out + rows * padded_dim;
    row_max = scores + rows * kKeysPerTile;
    row_sum = row_max + rows;
  }

  static int64_t floats(int64_t rows, int64_t padded_dim) {
    return 2 * padded_dim * kKeysPerTile + 2 * rows * padded_dim + rows * kKeysPerTile + 2 * rows;
  }
};

// Tile row r is query token r / group of the task and head r % group of its KV head's group.
template <typename Element>
void load_query(const AttendArgs& args, const TileTask& task, float factor, int64_t padded_dim, float* query) {
  const int64_t group = args.num_q_heads / args.num_kv_heads;
  for (int64_t r = 0; r < task.num_tokens * group; ++r) {
    const Element* source = static_cast<const Element*>(args.query) +
                            (task.first_token + r / group) * args.query_strides[0] +
                            (task.kv_head * group + r % group) * args.query_strides[1];
    for (int64_t d = 0; d < args.head_dim; d += kLanes) {
      const int64_t width = min_of(kLanes, args.head_dim - d);
      store(query + r * padded_dim + d, factor * (width == kLanes ? widen(source + d) : widen_partial(source + d, width)));
    }
  }
}

template <typename Element>
void store_out(const AttendArgs& args, const TileTask& task, int64_t padded_dim, const Scratch& scratch) {
  const int64_t group = args.num_q_heads / args.num_kv_heads;
  for (int64_t r = 0; r < task.num_tokens * group; ++r) {
    Element* target = static_cast<Element*>(args.out) +
                      ((task.first_token + r / group) * args.num_q_heads + task.kv_head * group + r % group) * args.head_dim;
    const float norm = scratch.row_sum[r] > 0.0f ? 1.0f / scratch.row_sum[r] : 0.0f;
    for (int64_t d = 0; d < args.head_dim; ++d)
      target[d] = narrow(scratch.out[r * padded_dim + d] * norm, static_cast<Element*>(nullptr));
  }
}

// Turns one row of scores (in units of log2) into weights relative to the row's running maximum, in place.
void update_row(float* scores, float* out, int64_t padded_dim, float& row_max, float& row_sum) {
  FloatVec top = load(scores);
  for (int64_t n = kLanes; n < kKeysPerTile; n += kLanes) top = max_of(top, load(scores + n));
  const float tile_max = lane_max(top);
  const float new_max = tile_max > row_max ? tile_max : row_max;
  if (new_max == kNegativeInfinity) {  // nothing visible yet: -inf minus -inf would be NaN
    for (int64_t n = 0; n < kKeysPerTile; n += kLanes) store(scores + n, FloatVec{});
    return;
  }
  FloatVec sum = {};
  for (int64_t n = 0; n < kKeysPerTile; n += kLanes) {
    const FloatVec weight = exp2_lanes(load(scores + n) - new_max);
    store(scores + n, weight);
    sum += weight;
  }
  if (new_max != row_max) {
    const float decay = exp2_lanes(splat(row_max - new_max))[0];
    row_sum *= decay;
    for (int64_t d = 0; d < padded_dim; d += kLanes) store(out + d, decay * load(out + d));
  }
  row_sum += lane_sum(sum);
  row_max = new_max;
}

void cap_scores(float* scores, int64_t count, float cap) {
  for (int64_t n = 0; n < count; n += kLanes) store(scores + n, cap * tanh_lanes(load(scores + n)));
}

template <typename Element>
void attend_cache(const AttendArgs& args, const TileTask& task, int64_t padded_dim, const Scratch& scratch) {
  const int64_t group = args.num_q_heads / args.num_kv_heads, rows = task.num_tokens * group;
  const int64_t window = args.sliding_window > 0 ? args.sliding_window : INT64_MAX / 2;
  const int64_t end = task.first_position + task.num_tokens;  // no token of the tile sees a key from here on
  const int64_t first_key = max_of(int64_t{0}, task.first_position + 1 - window);
  TileRows<Element> tiles[2];
  int64_t begin = first_key / kKeysPerTile * kKeysPerTile;
  int current = 0;
  tiles[current].locate(args, task, begin, first_key, end);
  for (; begin < end; begin += kKeysPerTile, current ^= 1) {
    const TileRows<Element>& tile = tiles[current];
    TileRows<Element>& next = tiles[current ^ 1];
    next.locate(args, task, begin + kKeysPerTile, first_key, end);
    pack_keys(tile, next, args.head_dim, scratch.keys);
    pack_values(tile, next, args.head_dim, padded_dim, scratch.values);
    multiply(scratch.query, padded_dim, scratch.keys, kKeysPerTile, scratch.scores, kKeysPerTile, rows, kKeysPerTile,
             args.head_dim, false);
    if (args.logit_softcap > 0) cap_scores(scratch.scores, rows * kKeysPerTile, args.logit_softcap * kLog2E);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t position = task.first_position + r / group;
      float* scores = scratch.scores + r * kKeysPerTile;
      for (int64_t n = 0; n < min_of(kKeysPerTile, position + 1 - window - begin); ++n) scores[n] = kNegativeInfinity;
      for (int64_t n = max_of(0, position + 1 - begin); n < kKeysPerTile; ++n) scores[n] = kNegativeInfinity;
      update_row(scores, scratch.out + r * padded_dim, padded_dim, scratch.row_max[r], scratch.row_sum[r]);
    }
    multiply(scratch.scores, kKeysPerTile, scratch.values, padded_dim, scratch.out, padded_dim, rows, padded_dim,
             tile.count, true);
  }
}

int64_t scratch_floats(const AttendArgs& args) {
  const int64_t rows = tokens_per_tile(args) * (args.num_q_heads / args.num_kv_heads);
  return Scratch::floats(rows, round_up(args.head_dim, kLanes));
}

void attend_tile(const AttendArgs& args, const TileTask& task, float* base) {
  const int64_t rows = task.num_tokens * (args.num_q_heads / args.num_kv_heads);
  const int64_t padded_dim = round_up(args.head_dim, kLanes);
  const Scratch scratch(base, rows, padded_dim);
  for (int64_t i = 0; i < rows * padded_dim; ++i) scratch.out[i] = 0.0f;
  for (int64_t r = 0; r < rows; ++r) {
    scratch.row_max[r] = kNegativeInfinity;
    scratch.row_sum[r] = 0.0f;
  }
  // Scores are kept in units of log2, so that a weight is one exp2; a soft cap works on score / cap first.
  const float factor = args.logit_softcap > 0 ? args.scale / args.logit_softcap : args.scale * kLog2E;
  switch (args.query_type) {
    case kFloat32: load_query<float>(args, task, factor, padded_dim, scratch.query); break;
    case kBFloat16: load_query<BFloat16>(args, task, factor, padded_dim, scratch.query); break;
    case kFloat16: load_query<Float16>(args, task, factor, padded_dim, scratch.query); break;
  }
  switch (args.cache_type) {
    case kFloat32: attend_cache<float>(args, task, padded_dim, scratch); break;
    case kBFloat16: attend_cache<BFloat16>(args, task, padded_dim, scratch); break;
    case kFloat16: attend_cache<Float16>(args, task, padded_dim, scratch); break;
  }
  switch (args.query_type) {
    case kFloat32: store_out<float>(args, task, padded_dim, scratch); break;
    case kBFloat16: store_out<BFloat16>(args, task, padded_dim, scratch); break;
    case kFloat16: store_out<Float16>(args, task, padded_dim, scratch); break;
  }
}

}  // namespace

extern const TileKernel kTileKernel = {attend_tile, scratch_floats};

}  // namespace OCTAVO_ISA
}  // namespace octavo
