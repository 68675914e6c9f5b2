// A tile of keys and values on its way from scattered blocks to the operands of attention's products: keys transposed,
// as float32 or as pairs of bfloat16. Included by attention_tile.cpp alone, inside its namespace. Positions that no
// query of the task sees are zeros: their table entries and slots are never read. Knows no softmax.
#pragma once

#include "attention_products.h"
#include "cache_elements.h"
#include "paged_attention.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// The keys that some query of a task sees, in the task's splits: [first_key, end). The first tile begins at `begin`.
struct KeyRange {
  int64_t first_key, begin, end;

  KeyRange(const AttendArgs& args, const TileTask& task) {
    const int64_t window = args.sliding_window > 0 ? args.sliding_window : INT64_MAX / 2;
    first_key = max_of(int64_t{0}, task.first_position + 1 - window);
    begin = max_of(task.first_split * kKeysPerSplit, first_key / kKeysPerTile * kKeysPerTile);
    end = min_of(task.first_position + task.num_tokens, (task.first_split + task.num_splits) * kKeysPerSplit);
  }
};

// Where the keys and values of up to kKeysPerTile consecutive positions lie. What may not be read points at `zeros`, a
// row of them: so does every position up to the next multiple of 16.
template <typename Element>
struct TileRows {
  const Element* key[kKeysPerTile];
  const Element* value[kKeysPerTile];
  float key_scale[kKeysPerTile], value_scale[kKeysPerTile];  // of a quantised cache; 0 where nothing may be read
  int64_t count = 0;

  // The tile of the task's keys that begins at position `begin`; an empty one where that is past their end.
  void locate(const AttendArgs& args, const TileTask& task, int64_t begin, const Element* zeros) {
    const KeyRange range(args, task);
    count = max_of(0, min_of(kKeysPerTile, range.end - begin));
    const int32_t* table = args.block_tables + task.row * args.block_tables_stride;
    const int64_t *ks = args.key_cache_strides, *vs = args.value_cache_strides;
    int64_t n = 0;
    for (; n < min_of(count, range.first_key - begin); ++n) forget(n, zeros);
    int64_t index = (begin + n) / args.block_size, slot = (begin + n) % args.block_size;
    for (; n < count; ++index, slot = 0) {
      const int64_t block = table[index], length = min_of(count - n, args.block_size - slot);
      const Element* k = static_cast<const Element*>(args.key_cache) + block * ks[0] + task.kv_head * ks[1];
      const Element* v = static_cast<const Element*>(args.value_cache) + block * vs[0] + task.kv_head * vs[1];
      fill_rows(k + slot * ks[2], ks[2], length, key + n);
      fill_rows(v + slot * vs[2], vs[2], length, value + n);
      if constexpr (kIsQuantised<Element>) locate_scales(args, task, block, slot, n, n + length);
      n += length;
    }
    for (n = count; n < round_up(count, 16); ++n) forget(n, zeros);
  }

 private:
  void forget(int64_t n, const Element* zeros) {
    key[n] = zeros;
    value[n] = zeros;
    key_scale[n] = 0.0f;
    value_scale[n] = 0.0f;
  }

  // Rows of a block are few, mostly 16: a loop made of vectors costs several times as much.
  __attribute__((noinline, optimize("no-tree-vectorize"))) static void fill_rows(const Element* row, int64_t stride,
                                                                                 int64_t length, const Element** rows) {
    for (int64_t i = 0; i < length; ++i, row += stride) rows[i] = row;
  }

  void locate_scales(const AttendArgs& args, const TileTask& task, int64_t block, int64_t slot, int64_t n,
                     int64_t stop) {
    const int64_t *ks = args.key_scale_strides, *vs = args.value_scale_strides;
    const float* k = args.key_scale + block * ks[0] + task.kv_head * ks[1] + slot * ks[2];
    const float* v = args.value_scale + block * vs[0] + task.kv_head * vs[1] + slot * vs[2];
    for (; n < stop; ++n, k += ks[2], v += vs[2]) {
      key_scale[n] = *k;
      value_scale[n] = *v;
    }
  }
};

// Fetches the cache lines of p[0, count), one of the next tile's rows: blocks lie scattered over pages, which the
// hardware prefetchers do not cross.
template <typename Element>
void prefetch(const Element* p, int64_t count) {
  for (int64_t d = 0; d < count; d += 64 / static_cast<int64_t>(sizeof(Element))) __builtin_prefetch(p + d);
}

#if defined(__AVX512F__)

// As `transpose` of lanes.h, with shuffles that need no index vectors and run on more ports; in registers only if inlined.
inline __attribute__((always_inline)) void transpose_square(FloatVec (&rows)[16]) {
  __m512 quads[16];  // quads[4 g + j], 128-bit lane b: column 4 b + j of rows 4 g to 4 g + 3
  for (int g = 0; g < 16; g += 4) {
    const __m512 a = (__m512)rows[g], b = (__m512)rows[g + 1], c = (__m512)rows[g + 2], d = (__m512)rows[g + 3];
    const __m512d low_ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), high_ab = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
    const __m512d low_cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d)), high_cd = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
    quads[g] = _mm512_castpd_ps(_mm512_unpacklo_pd(low_ab, low_cd));
    quads[g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low_ab, low_cd));
    quads[g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high_ab, high_cd));
    quads[g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high_ab, high_cd));
  }
  for (int j = 0; j < 4; ++j) {
    const __m512 even_low = _mm512_shuffle_f32x4(quads[j], quads[4 + j], 0x88);
    const __m512 odd_low = _mm512_shuffle_f32x4(quads[j], quads[4 + j], 0xdd);
    const __m512 even_high = _mm512_shuffle_f32x4(quads[8 + j], quads[12 + j], 0x88);
    const __m512 odd_high = _mm512_shuffle_f32x4(quads[8 + j], quads[12 + j], 0xdd);
    rows[j] = (FloatVec)_mm512_shuffle_f32x4(even_low, even_high, 0x88);
    rows[4 + j] = (FloatVec)_mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    rows[8 + j] = (FloatVec)_mm512_shuffle_f32x4(even_low, even_high, 0xdd);
    rows[12 + j] = (FloatVec)_mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
  }
}

#else

void transpose_square(FloatVec (&rows)[kLanes]) { transpose(rows); }

#endif

// ---- float32 ----

// keys[d, n] = key of position n, for n below the tile's count rounded up to 16.
template <typename Element>
void pack_keys(const TileRows<Element>& tile, const TileRows<Element>& next, int64_t head_dim, float* keys) {
  for (int64_t n = 0; n < tile.count; n += kLanes) {
    for (int i = 0; i < kLanes && n + i < next.count; ++i) prefetch(next.key[n + i], head_dim);
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      const int64_t width = min_of(kLanes, head_dim - d);
      FloatVec square[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = widen_up_to(tile.key[n + i] + d, width);
      transpose_square(square);
      for (int64_t i = 0; i < width; ++i) store(keys + (d + i) * kKeysPerTile + n, square[i]);
    }
  }
}

// values[n, d]; columns past head_dim are zero. Returns that the products take every value for what it is.
template <typename Element>
bool pack_values(const TileRows<Element>& tile, const TileRows<Element>& next, int64_t head_dim, int64_t padded_dim,
                 float* values) {
  for (int64_t n = 0; n < tile.count; ++n) {
    if (n < next.count) prefetch(next.value[n], head_dim);
    float* target = values + n * padded_dim;
    for (int64_t d = 0; d < padded_dim; d += kLanes)
      store(target + d, d < head_dim ? widen_up_to(tile.value[n] + d, head_dim - d) : FloatVec{});
  }
  return true;
}

// ---- pairs of bfloat16 ----

#if defined(__AVX512BF16__)

typedef uint16_t PairedVec __attribute__((vector_size(64)));  // 32 bfloat16

// 32 elements of a row of the cache; those that `mask` leaves out are zero and not read.
// Every number of the quantised types is a bfloat16.
PairedVec load_paired(const BFloat16* p, __mmask32 mask) { return (PairedVec)_mm512_maskz_loadu_epi16(mask, p); }

PairedVec join(__m512 low, __m512 high) { return (PairedVec)_mm512_cvtne2ps_pbh(high, low); }

PairedVec load_paired(const Int8* p, __mmask32 mask) {
  const __m256i bytes = _mm256_maskz_loadu_epi8(mask, p);
  return join(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes))),
              _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1))));
}

PairedVec load_paired(const Float8* p, __mmask32 mask) {
  Float8 bytes[32];
  const __m256i loaded = _mm256_maskz_loadu_epi8(mask, p);
  memcpy(bytes, &loaded, sizeof bytes);
  return join((__m512)widen(bytes), (__m512)widen(bytes + 16));
}

// Which of 32 elements exist where `count` are left.
__mmask32 first_lanes(int64_t count) { return count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1; }

// keys[d / 2, n] = elements d and d + 1 of the key of position n, for n below the tile's count rounded up to 16.
template <typename Element>
void pack_keys(const TileRows<Element>& tile, const TileRows<Element>& next, int64_t head_dim, BFloat16Pair* keys) {
  for (int64_t d = 0; d < head_dim; d += 32) {
    const __mmask32 mask = first_lanes(head_dim - d);
    const int64_t num_pairs = min_of(16, (head_dim - d + 1) / 2);
    for (int64_t n = 0; n < tile.count; n += 16) {
      FloatVec square[16];
      for (int i = 0; i < 16; ++i) square[i] = (FloatVec)load_paired(tile.key[n + i] + d, mask);
      if (n < next.count)
        for (int i = 0; i < 16; ++i) __builtin_prefetch(next.key[n + i] + d);
      transpose_square(square);
      BFloat16Pair* target = keys + d / 2 * kKeysPerTile + n;
      if (num_pairs == 16)
        for (int i = 0; i < 16; ++i) memcpy(target + i * kKeysPerTile, &square[i], 64);
      else
        for (int64_t i = 0; i < num_pairs; ++i) memcpy(target + i * kKeysPerTile, &square[i], 64);
    }
  }
}

template <int First, int... Lane>
PairedVec interleave(PairedVec a, PairedVec b, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(a, b, (First + Lane / 2 + Lane % 2 * 32)...);
}

// values[n / 2, d] = element d of the values of positions n and n + 1. Returns whether the products take every value for
// what it is: they take subnormal ones for zeros.
template <typename Element>
bool pack_values(const TileRows<Element>& tile, const TileRows<Element>& next, int64_t head_dim, int64_t padded_dim,
                 BFloat16Pair* values) {
  constexpr auto lanes = std::make_integer_sequence<int, 32>{};
  // Twice the bits, less one: in [1, 0xfd] for subnormal numbers, above for all others, zeros included.
  __m512i smallest = _mm512_set1_epi16(-1);
  for (int64_t d = 0; d < padded_dim; d += 32) {
    const __mmask32 mask = first_lanes(head_dim - d);
    for (int64_t n = 0; n < tile.count; n += 2) {
      const PairedVec even = load_paired(tile.value[n] + d, mask), odd = load_paired(tile.value[n + 1] + d, mask);
      if (n < next.count) {
        __builtin_prefetch(next.value[n] + d);
        __builtin_prefetch(next.value[n + 1] + d);
      }
      if constexpr (!kIsQuantised<Element>) {
        smallest = _mm512_min_epu16(smallest, (__m512i)(even + even - 1));
        smallest = _mm512_min_epu16(smallest, (__m512i)(odd + odd - 1));
      }
      BFloat16Pair* target = values + n / 2 * padded_dim + d;
      const PairedVec low = interleave<0>(even, odd, lanes), high = interleave<16>(even, odd, lanes);
      memcpy(target, &low, 64);
      if (d + 16 < padded_dim) memcpy(target + 16, &high, 64);
    }
  }
  return _mm512_cmplt_epu16_mask(smallest, _mm512_set1_epi16(0xff)) == 0;
}

#endif

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
