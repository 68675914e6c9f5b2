// Attention of one query tile over one sequence's blocks with an online softmax (FlashAttention, Dao et al. 2022,
// algorithm 1), in float32, or with products of bfloat16 pairs where both operands hold no more. Compiled once per
// instruction set, each into its own namespace (-DOCTAVO_ISA=...), so it uses nothing of the standard library that could
// be emitted as a shared inline function. Knows no threads and no batch.
//
// A tile of keys is transposed into scratch, so that both products are the same register-blocked product with vectors
// along the fast axis: scores[row, key] = q[row, d] * kT[d, key], out[row, d] += p[row, key] * v[key, d].
// Tiles and splits begin at absolute positions and every row is reduced in the same order whatever else is in the tile:
// a token's output does not depend on how its prompt was cut into chunks, nor on the tasks its keys were shared out to.
#include <cstdint>
#include <cstring>

#ifndef OCTAVO_ISA
#define OCTAVO_ISA generic
#endif

#include "attention_packing.h"
#include "attention_products.h"
#include "cache_elements.h"
#include "lanes.h"
#include "paged_attention.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// The running maximum may lag this far behind the scores, in units of log2, before what has been summed is scaled.
constexpr float kMaximumLag = 8.0f;

template <typename Term>
constexpr int64_t kTermsPer = 1;  // elements that one term of a sum holds
template <>
constexpr int64_t kTermsPer<BFloat16Pair> = 2;

// The working memory of one task, laid out in the thread's scratch. `merged` holds the splits before the present one.
template <typename Term>
struct Scratch {
  Term *keys, *values, *query, *weights;
  float *scores, *out, *merged, *row_max, *row_sums, *merged_max, *merged_sum;
  const float* zeros;  // [padded_dim + 32]

  Scratch(float* base, int64_t rows, int64_t padded_dim) {
    const int64_t wide_dim = round_up(padded_dim, 32);  // a square of pairs covers 32 elements
    keys = reinterpret_cast<Term*>(base);
    values = keys + wide_dim * kKeysPerTile;
    query = values + wide_dim * kKeysPerTile;
    weights = query + rows * wide_dim;
    scores = reinterpret_cast<float*>(weights + rows * kKeysPerTile);
    out = scores + rows * kKeysPerTile;
    merged = out + rows * padded_dim;
    row_sums = merged + rows * padded_dim;
    row_max = row_sums + rows * kLanes;
    merged_max = row_max + rows;
    merged_sum = merged_max + rows;
    float* zeroed = merged_sum + rows;
    memset(zeroed, 0, (padded_dim + 32) * sizeof(float));
    zeros = zeroed;
  }

  static int64_t floats(int64_t rows, int64_t padded_dim) {
    const int64_t wide_dim = round_up(padded_dim, 32);
    return 2 * wide_dim * kKeysPerTile + rows * (wide_dim + 2 * kKeysPerTile + 2 * padded_dim + kLanes + 3) +
           padded_dim + 32;
  }
};

// ---- query and output ----

// Tile row r is query token r / group of the task and head r % group of its KV head's group.
template <typename Element>
const Element* query_row(const AttendArgs& args, const TileTask& task, int64_t r) {
  const int64_t group = args.num_q_heads / args.num_kv_heads;
  return static_cast<const Element*>(args.query) + (task.first_token + r / group) * args.query_strides[0] +
         (task.kv_head * group + r % group) * args.query_strides[1];
}

template <typename Element>
void widen_query(const AttendArgs& args, const TileTask& task, int64_t stride, float* query) {
  for (int64_t r = 0; r < tile_rows(args, task); ++r) {
    const Element* source = query_row<Element>(args, task, r);
    for (int64_t d = 0; d < args.head_dim; d += kLanes)
      store(query + r * stride + d, widen_up_to(source + d, args.head_dim - d));
  }
}

void load_query(const AttendArgs& args, const TileTask& task, int64_t stride, float* query) {
  switch (args.query_type) {
    case kFloat32: widen_query<float>(args, task, stride, query); break;
    case kBFloat16: widen_query<BFloat16>(args, task, stride, query); break;
    case kFloat16: widen_query<Float16>(args, task, stride, query); break;
  }
}

void load_query(const AttendArgs& args, const TileTask& task, int64_t stride, BFloat16Pair* query) {
  for (int64_t r = 0; r < tile_rows(args, task); ++r) {
    query[r * stride + (args.head_dim - 1) / 2] = BFloat16Pair{0};  // the last pair may have one element
    memcpy(query + r * stride, query_row<BFloat16>(args, task, r), args.head_dim * sizeof(BFloat16));
  }
}

template <typename Element>
void narrow_out(const AttendArgs& args, const TileTask& task, const float* out, const float* row_sum) {
  const int64_t group = args.num_q_heads / args.num_kv_heads;
  for (int64_t r = 0; r < tile_rows(args, task); ++r) {
    Element* target = static_cast<Element*>(args.out) +
                      ((task.first_token + r / group) * args.num_q_heads + task.kv_head * group + r % group) * args.head_dim;
    const float norm = row_sum[r] == 0.0f ? 0.0f : 1.0f / row_sum[r];
    for (int64_t d = 0; d < args.head_dim; d += kLanes)
      narrow_up_to(load(out + r * padded_head_dim(args) + d) * norm, args.head_dim - d, target + d);
  }
}

void store_out(const AttendArgs& args, const TileTask& task, const float* out, const float* row_sum) {
  switch (args.out_type) {
    case kFloat32: narrow_out<float>(args, task, out, row_sum); break;
    case kBFloat16: narrow_out<BFloat16>(args, task, out, row_sum); break;
    case kFloat16: narrow_out<Float16>(args, task, out, row_sum); break;
  }
}

// ---- softmax ----

// Keys of a tile that one query sees: [first, last).
struct Visible {
  int64_t first, last;
};

// Turns one row of products into scores in units of log2, those it does not see into -inf; returns the largest.
float scale_scores(const AttendArgs& args, float* scores, int64_t columns, Visible visible, const float* key_scale) {
  static constexpr int32_t kCount[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  // A soft cap works on score / cap first.
  const bool is_capped = args.logit_softcap > 0, is_masked = visible.first > 0 || visible.last < columns;
  const FloatVec factor = splat(is_capped ? args.scale / args.logit_softcap : args.scale * kLog2E);
  IntVec lane;
  memcpy(&lane, kCount, sizeof lane);
  FloatVec top = splat(kNegativeInfinity);
  for (int64_t n = 0; n < columns; n += kLanes) {
    FloatVec score = load(scores + n) * factor;
    if (key_scale) score *= load(key_scale + n);
    if (is_capped) score = args.logit_softcap * kLog2E * tanh_lanes(score);
    if (is_masked) {
      const IntVec place = lane + static_cast<int32_t>(n);
      const IntVec seen = (place >= static_cast<int32_t>(max_of(visible.first, 0))) &
                          (place < static_cast<int32_t>(max_of(visible.last, 0)));
      score = seen ? score : splat(kNegativeInfinity);
    }
    store(scores + n, score);
    top = max_of(top, score);
  }
  return lane_max(top);
}

void store_weights(const float* scores, int64_t columns, const float* value_scale, float* weights) {
  for (int64_t n = 0; n < columns; n += kLanes)
    store(weights + n, value_scale ? load(scores + n) * load(value_scale + n) : load(scores + n));
}

#if defined(__AVX512BF16__)
void store_weights(const float* scores, int64_t columns, const float* value_scale, BFloat16Pair* weights) {
  for (int64_t n = 0; n < columns; n += 32) {
    FloatVec low = load(scores + n), high = n + 16 < columns ? load(scores + n + 16) : FloatVec{};
    if (value_scale) low *= load(value_scale + n);
    if (value_scale && n + 16 < columns) high *= load(value_scale + n + 16);
    const PairedVec pairs = join((__m512)low, (__m512)high);
    memcpy(weights + n / 2, &pairs, sizeof pairs);
  }
}
#endif

// Turns one row of scores into weights relative to the row's running maximum, in place.
template <bool IsRounded>
void weigh_row(float* scores, int64_t columns, float tile_max, float* out, int64_t padded_dim, float& row_max,
               float* row_sums) {
  FloatVec sums = load(row_sums);
  if (!(tile_max <= row_max + kMaximumLag)) {  // NaN comes here too, and stays
    if (row_max != kNegativeInfinity) {
      const FloatVec decay = exp2_weights<false>(splat(row_max - tile_max));
      sums *= decay;
      for (int64_t d = 0; d < padded_dim; d += kLanes) store(out + d, decay * load(out + d));
    }
    row_max = tile_max;
  }
  if (row_max == kNegativeInfinity) {  // nothing visible yet: -inf minus -inf would be NaN
    for (int64_t n = 0; n < columns; n += kLanes) store(scores + n, FloatVec{});
    return;
  }
  for (int64_t n = 0; n < columns; n += kLanes) {
    const FloatVec weight = exp2_weights<IsRounded>(load(scores + n) - row_max);
    store(scores + n, weight);
    sums += weight;
  }
  store(row_sums, sums);
}

// ---- splits ----

// Adds the results of the next split, `out` relative to `row_max`, to those before it.
void merge_row(const float* out, float row_max, float row_sum, int64_t padded_dim, float* merged, float& merged_max,
               float& merged_sum) {
  if (row_max == kNegativeInfinity) return;  // it sees nothing of this split
  if (merged_max == kNegativeInfinity) {
    memcpy(merged, out, padded_dim * sizeof(float));
    merged_max = row_max;
    merged_sum = row_sum;
    return;
  }
  const float top = merged_max > row_max ? merged_max : row_max;
  const FloatVec before = exp2_weights<false>(splat(merged_max - top)), now = exp2_weights<false>(splat(row_max - top));
  for (int64_t d = 0; d < padded_dim; d += kLanes)
    store(merged + d, before * load(merged + d) + now * load(out + d));
  merged_sum = before[0] * merged_sum + now[0] * row_sum;
  merged_max = top;
}

void clear_merged(int64_t rows, int64_t padded_dim, float* merged, float* merged_max, float* merged_sum) {
  memset(merged, 0, rows * padded_dim * sizeof(float));
  for (int64_t r = 0; r < rows; ++r) {
    merged_max[r] = kNegativeInfinity;
    merged_sum[r] = 0.0f;
  }
}

#if defined(__AVX512BF16__)
float from_bits(uint32_t bits) { float x; memcpy(&x, &bits, sizeof x); return x; }

// Adds what the products of pairs take for zero: subnormal values.
void add_subnormals(const BFloat16Pair* weights, const BFloat16Pair* values, int64_t rows, int64_t count,
                    int64_t padded_dim, float* out) {
  for (int64_t n = 0; n < count; ++n) {
    for (int64_t d = 0; d < padded_dim; ++d) {
      const uint32_t value = values[n / 2 * padded_dim + d].bits >> n % 2 * 16 << 16;
      if ((value & 0x7f800000u) != 0 || (value & 0x7f0000u) == 0) continue;
      for (int64_t r = 0; r < rows; ++r) {
        const uint32_t weight = weights[r * kKeysPerTile / 2 + n / 2].bits >> n % 2 * 16 << 16;
        out[r * padded_dim + d] += from_bits(weight) * from_bits(value);
      }
    }
  }
}
#endif

// One task over the keys of its splits. `upcoming` is a task that this thread may take next, or null.
template <typename Element, typename Term>
struct TaskRun {
  const AttendArgs& args;
  const TileTask& task;
  const TileTask* upcoming;
  const Scratch<Term>& scratch;
  const int64_t rows = tile_rows(args, task), group = args.num_q_heads / args.num_kv_heads;
  const int64_t padded_dim = padded_head_dim(args);
  const int64_t window = args.sliding_window > 0 ? args.sliding_window : INT64_MAX / 2;
  const KeyRange range{args, task};
  TileRows<Element> tiles[2] = {};  // the present one and the next, which is fetched meanwhile
  int current = 0;

  // Attends to the keys of one tile, from position `begin` on.
  void attend(const TileRows<Element>& tile, const TileRows<Element>& next, int64_t begin, bool is_first) const {
    constexpr int64_t terms = kTermsPer<Term>;
    const int64_t columns = round_up(tile.count, 16), wide_dim = round_up(padded_dim, 32);
    const float* key_scale = kIsQuantised<Element> ? tile.key_scale : nullptr;
    const float* value_scale = kIsQuantised<Element> ? tile.value_scale : nullptr;
    pack_keys(tile, next, args.head_dim, scratch.keys);
    [[maybe_unused]] const bool is_exact = pack_values(tile, next, args.head_dim, padded_dim, scratch.values);
    multiply(scratch.query, wide_dim / terms, scratch.keys, kKeysPerTile, scratch.scores, kKeysPerTile, rows, columns,
             (args.head_dim + terms - 1) / terms, false);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t position = task.first_position + r / group;
      float* scores = scratch.scores + r * kKeysPerTile;
      const float tile_max =
          scale_scores(args, scores, columns, {position + 1 - window - begin, position + 1 - begin}, key_scale);
      weigh_row<terms == 2>(scores, columns, tile_max, scratch.out + r * padded_dim, padded_dim, scratch.row_max[r],
                            scratch.row_sums + r * kLanes);
      store_weights(scores, columns, value_scale, scratch.weights + r * (kKeysPerTile / terms));
    }
    multiply(scratch.weights, kKeysPerTile / terms, scratch.values, padded_dim, scratch.out, padded_dim, rows,
             padded_dim, (tile.count + terms - 1) / terms, !is_first);
#if defined(__AVX512BF16__)
    if constexpr (terms == 2)
      if (!is_exact) add_subnormals(scratch.weights, scratch.values, rows, tile.count, padded_dim, scratch.out);
#endif
  }

  // Where the rows lie that are needed after those of the tile that begins at `begin`.
  void locate_next(int64_t begin, const Element* zeros) {
    TileRows<Element>& next = tiles[current ^ 1];
    if (begin + kKeysPerTile < range.end || !upcoming) next.locate(args, task, begin + kKeysPerTile, zeros);
    else next.locate(args, *upcoming, KeyRange(args, *upcoming).begin, zeros);
  }

  // Attends to the keys of one split, in scratch.out relative to scratch.row_max.
  void attend_split(int64_t split) {
    for (int64_t r = 0; r < rows; ++r) {
      scratch.row_max[r] = kNegativeInfinity;
      store(scratch.row_sums + r * kLanes, FloatVec{});
    }
    const Element* zeros = reinterpret_cast<const Element*>(scratch.zeros);
    const int64_t first = max_of(split * kKeysPerSplit, range.begin), stop = min_of(range.end, (split + 1) * kKeysPerSplit);
    for (int64_t begin = first; begin < stop; begin += kKeysPerTile, current ^= 1) {
      if (begin == range.begin) tiles[current].locate(args, task, begin, zeros);
      locate_next(begin, zeros);
      attend(tiles[current], tiles[current ^ 1], begin, begin == first);
    }
  }

  void run(float* results) {
    load_query(args, task, round_up(padded_dim, 32) / kTermsPer<Term>, scratch.query);
    const bool is_alone = !results && task.num_splits == 1;
    if (!results && !is_alone)
      clear_merged(rows, padded_dim, scratch.merged, scratch.merged_max, scratch.merged_sum);
    for (int64_t split = 0; split < task.num_splits; ++split) {
      attend_split(task.first_split + split);
      float* split_results = results ? results + split * split_floats(args, task) : nullptr;
      for (int64_t r = 0; r < rows; ++r) {
        const float row_sum = lane_sum(load(scratch.row_sums + r * kLanes));
        const float* out = scratch.out + r * padded_dim;
        if (results) {
          memcpy(split_results + r * padded_dim, out, padded_dim * sizeof(float));
          split_results[rows * padded_dim + r] = scratch.row_max[r];
          split_results[rows * padded_dim + rows + r] = row_sum;
        } else if (is_alone) {
          scratch.merged_sum[r] = row_sum;
        } else {
          merge_row(out, scratch.row_max[r], row_sum, padded_dim, scratch.merged + r * padded_dim,
                    scratch.merged_max[r], scratch.merged_sum[r]);
        }
      }
    }
    if (!results) store_out(args, task, is_alone ? scratch.out : scratch.merged, scratch.merged_sum);
  }
};

// ---- entry points ----

int64_t scratch_floats(const AttendArgs& args, int64_t num_rows) {
  return Scratch<float>::floats(num_rows, padded_head_dim(args));
}

template <typename Element, typename Term>
void attend_cache(const AttendArgs& args, const TileTask& task, const TileTask* upcoming, float* base,
                  float* results) {
  const Scratch<Term> scratch(base, tile_rows(args, task), padded_head_dim(args));
  TaskRun<Element, Term>{args, task, upcoming, scratch}.run(results);
}

void attend_tile(const AttendArgs& args, const TileTask& task, const TileTask* upcoming, float* base, float* results) {
#if defined(__AVX512BF16__)
  if (args.query_type == kBFloat16) {
    switch (args.cache_type) {
      case kBFloat16: return attend_cache<BFloat16, BFloat16Pair>(args, task, upcoming, base, results);
      case kInt8: return attend_cache<Int8, BFloat16Pair>(args, task, upcoming, base, results);
      case kFloat8E4M3: return attend_cache<Float8, BFloat16Pair>(args, task, upcoming, base, results);
    }
  }
#endif
  switch (args.cache_type) {
    case kFloat32: return attend_cache<float, float>(args, task, upcoming, base, results);
    case kBFloat16: return attend_cache<BFloat16, float>(args, task, upcoming, base, results);
    case kFloat16: return attend_cache<Float16, float>(args, task, upcoming, base, results);
    case kInt8: return attend_cache<Int8, float>(args, task, upcoming, base, results);
    case kFloat8E4M3: return attend_cache<Float8, float>(args, task, upcoming, base, results);
  }
}

void merge_tile(const AttendArgs& args, const TileTask& task, int64_t num_splits, const float* results, float* base) {
  const int64_t rows = tile_rows(args, task), padded_dim = padded_head_dim(args);
  const Scratch<float> scratch(base, rows, padded_dim);
  clear_merged(rows, padded_dim, scratch.merged, scratch.merged_max, scratch.merged_sum);
  for (int64_t split = 0; split < num_splits; ++split, results += split_floats(args, task))
    for (int64_t r = 0; r < rows; ++r)
      merge_row(results + r * padded_dim, results[rows * padded_dim + r], results[rows * padded_dim + rows + r],
                padded_dim, scratch.merged + r * padded_dim, scratch.merged_max[r], scratch.merged_sum[r]);
  store_out(args, task, scratch.merged, scratch.merged_sum);
}

}  // namespace

extern const TileKernel kTileKernel = {attend_tile, merge_tile, scratch_floats};

}  // namespace OCTAVO_ISA
}  // namespace octavo
