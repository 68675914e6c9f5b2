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

#ifndef OCTAVO_ISA
#define OCTAVO_ISA generic
#endif

#include "lanes.h"
#include "paged_attention.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// ---- products ----

constexpr int kRowsPerBlock = 4;
constexpr int kVectorsPerBlock = kLanes == 16 ? 4 : 2;  // 4 x 4 accumulators of 32 registers, 4 x 2 of 16

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
