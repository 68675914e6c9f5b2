// What choosing and ranking the tokens of one row of logits share: the row in blocks, its largest logit, and the bound
// of its largest values without sorting them. Included into the kernels of every instruction set, inside its namespace:
// everything here has internal linkage. Knows no distribution.
#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// A block's vectors are added up in float32; the sums of blocks are added in float64. A group is what lies in one lane
// of a block: 16 tokens.
constexpr int kBlockVectors = 16;
constexpr int64_t kBlock = kBlockVectors * kLanes;  // tokens

int64_t num_blocks(int64_t size) { return (size + kBlock - 1) / kBlock; }

// The first token of a group; the next ones follow kLanes apart.
int64_t first_token(int64_t group) { return group / kLanes * kBlock + group % kLanes; }

// body(block, tokens) for every block of the row; the last one is filled up with -inf.
template <typename Body>
void for_blocks(const float* logits, int64_t size, const Body& body) {
  int64_t block = 0;
  for (; (block + 1) * kBlock <= size; ++block) body(block, logits + block * kBlock);
  if (block * kBlock < size) {
    float tail[kBlock];
    for (int i = 0; i < kBlockVectors; ++i) store(tail + i * kLanes, splat(kNegativeInfinity));
    memcpy(tail, logits + block * kBlock, (size - block * kBlock) * sizeof(float));
    body(block, static_cast<const float*>(tail));
  }
}

// The largest logit; NaN if any is.
float best_logit(const float* logits, int64_t size) {
  constexpr int chains = 4;
  FloatVec best[chains];
  IntVec unordered[chains] = {};
  for (int c = 0; c < chains; ++c) best[c] = splat(kNegativeInfinity);
  for_blocks(logits, size, [&](int64_t, const float* tokens) {
    for (int i = 0; i < kBlockVectors; ++i) {
      const FloatVec logit = load(tokens + i * kLanes);
      best[i % chains] = max_of(logit, best[i % chains]);
      unordered[i % chains] |= logit != logit;
    }
  });
  const IntVec any = (unordered[0] | unordered[1]) | (unordered[2] | unordered[3]);
  for (int i = 0; i < kLanes; ++i)
    if (any[i]) return __builtin_nanf("");
  return lane_max(max_of(max_of(best[0], best[1]), max_of(best[2], best[3])));
}

int32_t bits_of(float x) { int32_t bits; memcpy(&bits, &x, sizeof bits); return bits; }
float float_of(int32_t bits) { float x; memcpy(&x, &bits, sizeof x); return x; }

// Integers in the order of the floats: those of negative ones are turned round. The two zeros are one, and NaN is the
// largest.
int32_t key_of(float x) {
  if (x != x) return INT32_MAX;
  const int32_t bits = bits_of(x + 0.0f);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

// The number of the values that are not below `bound`.
int64_t count_from(const int32_t* keys, int64_t count, int32_t bound) {
  IntVec above[2] = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    IntVec a, b;
    memcpy(&a, keys + i, sizeof a);
    memcpy(&b, keys + i + kLanes, sizeof b);
    above[0] -= a >= bound;
    above[1] -= b >= bound;
  }
  int64_t total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += above[0][lane] + above[1][lane];
  for (; i < count; ++i) {
    int32_t key;  // the keys of nonnegative floats are read where these lie
    memcpy(&key, keys + i, sizeof key);
    total += key >= bound;
  }
  return total;
}

// A bound that exactly those keys are not below which are not below the wanted-th largest one; INT32_MIN if there are
// not so many.
int32_t bound_by_count(const int32_t* keys, int64_t count, int64_t wanted) {
  int64_t low = INT32_MIN, high = static_cast<int64_t>(INT32_MAX) + 1;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    const int64_t above = count_from(keys, count, static_cast<int32_t>(middle));
    if (above >= wanted) low = middle;
    else high = middle;
    if (above == wanted) break;
  }
  return static_cast<int32_t>(low);
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
