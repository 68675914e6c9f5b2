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

// Where the keys and values of up to kKeysPerTile consecutive positions lie; null where nothing may be read.
template <typename Element>
struct TileRows {
  const Element* key[kKeysPerTile];
  const Element* value[kKeysPerTile];
  float key_scale[kKeysPerTile], value_scale[kKeysPerTile];  // of a quantised cache; 0 where nothing may be read
  int64_t count = 0;

  // The positions from `begin` on that lie in [first_key, end).
  void locate(const AttendArgs& args, const TileTask& task, int64_t begin, int64_t first_key, int64_t end) {
    count = max_of(0, min_of(kKeysPerTile, end - begin));
    const int32_t* table = args.block_tables + task.row * args.block_tables_stride;
    const int64_t *ks = args.key_cache_strides, *vs = args.value_cache_strides;
    int64_t n = 0;
    for (; n < min_of(count, first_key - begin); ++n) forget(n);
    int64_t index = (begin + n) / args.block_size, slot = (begin + n) % args.block_size;
    for (; n < count; ++index, slot = 0) {
      const int64_t block = table[index], stop = min_of(count, n + args.block_size - slot);
      const Element* k = static_cast<const Element*>(args.key_cache) + block * ks[0] + task.kv_head * ks[1];
      const Element* v = static_cast<const Element*>(args.value_cache) + block * vs[0] + task.kv_head * vs[1];
      if constexpr (kIsQuantised<Element>) locate_scales(args, task, block, slot, n, stop);
      for (; n < stop; ++n, ++slot) {
        key[n] = k + slot * ks[2];
        value[n] = v + slot * vs[2];
      }
    }
    for (n = count; n < round_up(count, 16); ++n) forget(n);
  }

 private:
  void forget(int64_t n) {
    key[n] = nullptr;
    value[n] = nullptr;
    key_scale[n] = 0.0f;
    value_scale[n] = 0.0f;
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
// hardware prefetchers do not cross. A null row has none.
template <typename Element>
void prefetch(const Element* p, int64_t count) {
  for (int64_t d = 0; p && d < count; d += 64 / static_cast<int64_t>(sizeof(Element))) __builtin_prefetch(p + d);
}

// ---- float32 ----

// keys[d, n] = key of position n, for n below the tile's count rounded up to 16.
template <typename Element>
void pack_keys(const TileRows<Element>& tile, const TileRows<Element>& next, int64_t head_dim, float* keys) {
  for (int64_t n = 0; n < tile.count; n += kLanes) {
    for (int i = 0; i < kLanes && n + i < next.count; ++i) prefetch(next.key[n + i], head_dim);
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      const int64_t width = min_of(kLanes, head_dim - d);
      FloatVec square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const Element* source = tile.key[n + i];
        square[i] = source ? widen_up_to(source + d, width) : FloatVec{};
      }
      transpose(square);
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
    const Element* source = tile.value[n];
    float* target = values + n * padded_dim;
    for (int64_t d = 0; d < padded_dim; d += kLanes) {
      if (!source || d >= head_dim) store(target + d, FloatVec{});
      else store(target + d, widen_up_to(source + d, head_dim - d));
    }
  }
  return true;
}

// ---- pairs of bfloat16 ----

#if defined(__AVX512BF16__)

typedef uint16_t PairedVec __attribute__((vector_size(64)));  // 32 bfloat16

__mmask32 first_lanes(int64_t count) { return count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1; }

// `count` elements, at most 32, then zeros; every number of the quantised types is a bfloat16.
PairedVec load_paired(const BFloat16* p, int64_t count) {
  return (PairedVec)_mm512_maskz_loadu_epi16(first_lanes(count), p);
}

PairedVec join(__m512 low, __m512 high) { return (PairedVec)_mm512_cvtne2ps_pbh(high, low); }

PairedVec load_paired(const Int8* p, int64_t count) {
  const __m256i bytes = _mm256_maskz_loadu_epi8(first_lanes(count), p);
  return join(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes))),
              _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1))));
}

PairedVec load_paired(const Float8* p, int64_t count) {
  Float8 bytes[32];
  const __m256i loaded = _mm256_maskz_loadu_epi8(first_lanes(count), p);
  memcpy(bytes, &loaded, sizeof bytes);
  return join((__m512)widen(bytes), (__m512)widen(bytes + 16));
}

// keys[d / 2, n] = elements d and d + 1 of the key of position n, for n below the tile's count rounded up to 16.
template <typename Element>
void pack_keys(const TileRows<Element>& tile, const TileRows<Element>& next, int64_t head_dim, BFloat16Pair* keys) {
  for (int64_t n = 0; n < tile.count; n += 16) {
    for (int i = 0; i < 16 && n + i < next.count; ++i) prefetch(next.key[n + i], head_dim);
    for (int64_t d = 0; d < head_dim; d += 32) {
      FloatVec square[16];
      for (int i = 0; i < 16; ++i) {
        const Element* source = tile.key[n + i];
        square[i] = source ? (FloatVec)load_paired(source + d, head_dim - d) : FloatVec{};
      }
      transpose(square);
      const int64_t num_pairs = min_of(16, (head_dim - d + 1) / 2);
      for (int64_t i = 0; i < num_pairs; ++i) memcpy(keys + (d / 2 + i) * kKeysPerTile + n, &square[i], 64);
    }
  }
}

template <int... Lane>
PairedVec interleave_lower(PairedVec a, PairedVec b, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(a, b, (Lane / 2 + Lane % 2 * 32)...);
}

template <int... Lane>
PairedVec interleave_upper(PairedVec a, PairedVec b, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(a, b, (16 + Lane / 2 + Lane % 2 * 32)...);
}

// values[n / 2, d] = element d of the values of positions n and n + 1. Returns whether the products take every value for
// what it is: they take subnormal ones for zeros.
template <typename Element>
bool pack_values(const TileRows<Element>& tile, const TileRows<Element>& next, int64_t head_dim, int64_t padded_dim,
                 BFloat16Pair* values) {
  constexpr auto lanes = std::make_integer_sequence<int, 32>{};
  __mmask32 subnormal = 0;
  for (int64_t n = 0; n < tile.count; n += 2) {
    BFloat16Pair* target = values + n / 2 * padded_dim;
    for (int64_t d = 0; d < padded_dim; d += 32) {
      PairedVec rows[2];
      for (int i = 0; i < 2; ++i) {
        if (d == 0 && n + i < next.count) prefetch(next.value[n + i], head_dim);
        const Element* source = tile.value[n + i];
        rows[i] = source ? load_paired(source + d, head_dim - d) : PairedVec{};
        if constexpr (!kIsQuantised<Element>)
          subnormal |= _mm512_testn_epi16_mask((__m512i)rows[i], _mm512_set1_epi16(0x7f80)) &
                       _mm512_test_epi16_mask((__m512i)rows[i], _mm512_set1_epi16(0x007f));
      }
      const PairedVec lower = interleave_lower(rows[0], rows[1], lanes);
      memcpy(target + d, &lower, 64);
      if (d + 16 >= padded_dim) continue;
      const PairedVec upper = interleave_upper(rows[0], rows[1], lanes);
      memcpy(target + d + 16, &upper, 64);
    }
  }
  return subnormal == 0;
}

#endif

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
