// Chooses the token of one row of logits without sorting the row. Compiled once per instruction set, each into its own
// namespace (-DOCTAVO_ISA=...), so it uses nothing of the standard library that could be emitted as a shared inline
// function. Knows no threads and no batch.
//
// A token's weight is its probability relative to the likeliest one's, in float32. A cut is the smallest weight that is
// kept; it is found by bisection over the weights that can be it. The maximum of every group of tokens says which those
// are, so that most of the row is not looked at again.
#include <cstdint>
#include <cstring>

#ifndef OCTAVO_ISA
#define OCTAVO_ISA generic
#endif

#include "lanes.h"
#include "sampler.h"
#include "token_order.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr float kMinTemperature = 1e-30f;  // its reciprocal is finite; far below it only the likeliest token has mass

struct DoubleLanes { double lane[kLanes]; };

// Scratch of one row.
struct Scratch {
  float *weights, *candidates;  // [num_blocks * kBlock]
  double* block_mass;           // [num_blocks]
  float* group_max;             // [num_blocks * kLanes]

  Scratch(float* base, int64_t vocab_size) {
    const int64_t blocks = num_blocks(vocab_size);
    weights = base;
    candidates = weights + blocks * kBlock;
    block_mass = reinterpret_cast<double*>(candidates + blocks * kBlock);
    group_max = reinterpret_cast<float*>(block_mass + round_up(blocks, 8));
  }
};

int64_t scratch_floats(int64_t vocab_size) {
  const int64_t blocks = num_blocks(vocab_size);
  return blocks * (2 * kBlock + kLanes) + 2 * round_up(blocks, 8);
}

// The first token with that logit, NaN being one.
int64_t first_of(const float* logits, int64_t size, float logit) {
  const bool is_nan = logit != logit;
  int64_t block = 0;
  for (; (block + 1) * kBlock <= size; ++block) {
    IntVec found = {};
    for (int i = 0; i < kBlockVectors; ++i) {
      const FloatVec v = load(logits + block * kBlock + i * kLanes);
      found |= is_nan ? (v != v) : (v == logit);
    }
    int32_t any = 0;
    for (int i = 0; i < kLanes; ++i) any |= found[i];
    if (any) break;
  }
  for (int64_t token = block * kBlock; token < size; ++token)
    if (is_nan ? logits[token] != logits[token] : logits[token] == logit) return token;
  return 0;
}

// ---- cuts ----

// The mass of those weights that are not below `bound`.
double mass_from(const float* weights, int64_t count, float bound) {
  DoubleLanes total = {};
  int64_t i = 0;
  while (i + kLanes <= count) {
    FloatVec sum = {};
    const int64_t end = min_of(count - kLanes, i + kBlock - kLanes);
    for (; i <= end; i += kLanes) {
      const FloatVec weight = load(weights + i);
      sum += weight >= bound ? weight : FloatVec{};
    }
    for (int lane = 0; lane < kLanes; ++lane) total.lane[lane] += sum[lane];
  }
  double mass = 0;
  for (; i < count; ++i) mass += weights[i] >= bound ? weights[i] : 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) mass += total.lane[lane];
  return mass;
}

// Drops the weights that are not in [low, high); returns the number of the others.
int64_t keep_between(float* weights, int64_t count, float low, float high) {
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float weight = weights[i];
    weights[kept] = weight;
    kept += (weight >= low) & (weight < high);
  }
  return kept;
}

// The largest weight such that those not below it have at least the mass wanted; `low_weight` if none has.
// Changes the weights.
float bound_by_mass(float* weights, int64_t count, float low_weight, double wanted) {
  constexpr int passes_per_sweep = 4;
  int32_t low = bits_of(low_weight), high = bits_of(1.0f) + 1;
  double dropped = 0;  // mass of weights that were not below `high`
  for (int pass = 1; high - low > 1; ++pass) {
    const int32_t middle = low + (high - low) / 2;
    if (dropped + mass_from(weights, count, float_of(middle)) >= wanted) low = middle;
    else high = middle;
    if (pass % passes_per_sweep) continue;
    dropped += mass_from(weights, count, float_of(high));
    count = keep_between(weights, count, float_of(low), float_of(high));
  }
  return float_of(low);
}

// Weights of one block's tokens.
void weigh_block(const float* tokens, float best, float scale, float min_p, float* weights) {
  for (int i = 0; i < kBlockVectors; ++i) {
    const FloatVec weight = exp2_lanes((load(tokens + i * kLanes) - best) * scale);
    store(weights + i * kLanes, weight < min_p ? FloatVec{} : weight);
  }
}

// The mass of one block's weights that are not below the cut.
double block_mass(const float* weights, float cut) {
  FloatVec sum = {};
  for (int i = 0; i < kBlockVectors; ++i) {
    const FloatVec weight = load(weights + i * kLanes);
    sum += weight >= cut ? weight : FloatVec{};
  }
  return lane_sum(sum);
}

// The tokens' weights and their maxima, one of each 16.
void weigh(const float* logits, int64_t size, float best, float scale, float min_p, const Scratch& scratch) {
  for_blocks(logits, size, [&](int64_t block, const float* tokens) {
    float* weights = scratch.weights + block * kBlock;
    weigh_block(tokens, best, scale, min_p, weights);
    FloatVec largest = load(weights);
    for (int i = 1; i < kBlockVectors; ++i) largest = max_of(load(weights + i * kLanes), largest);
    store(scratch.group_max + block * kLanes, largest);
  });
}

// Copies the weights that are not below `bound` to the candidates, in any order; returns their number.
int64_t gather_weights(int64_t num_groups, float bound, const Scratch& scratch) {
  int64_t count = 0;
  for (int64_t group = 0; group < num_groups; ++group) {
    if (scratch.group_max[group] < bound) continue;
    const float* weights = scratch.weights + first_token(group);
    for (int i = 0; i < kBlockVectors; ++i) {
      scratch.candidates[count] = weights[i * kLanes];
      count += weights[i * kLanes] >= bound;
    }
  }
  return count;
}

float larger(float a, float b) { return a > b ? a : b; }

// The smallest of the `wanted` largest weights, or any above the next smaller one; 0 where there are not so many.
float cut_by_count(const float* weights, int64_t count, int64_t wanted) {
  const int32_t bound = bound_by_count(reinterpret_cast<const int32_t*>(weights), count, wanted);
  return bound > 0 ? float_of(bound) : 0.0f;
}

// The smallest weight that is kept by top_k, then top_p.
float find_cut(int64_t size, int64_t top_k, float top_p, const Scratch& scratch) {
  const int64_t blocks = num_blocks(size), num_groups = blocks * kLanes;
  float cut = 0;
  if (top_k > 0 && top_k < size) {
    // As many groups have a weight that is not below it: the cut is not either.
    cut = cut_by_count(scratch.group_max, num_groups, top_k);
    const int64_t count = gather_weights(num_groups, cut, scratch);
    cut = larger(cut, cut_by_count(scratch.candidates, count, top_k));
  }
  if (top_p < 1) {
    double mass = 0;
    for (int64_t block = 0; block < blocks; ++block) mass += block_mass(scratch.weights + block * kBlock, cut);
    // All tokens below this weight together have less mass than may be cut.
    const float least = static_cast<float>((1.0 - top_p) * mass / size) * 0.999f;
    const float bound = larger(larger(cut, least), 0x1p-126f);
    const int64_t count = gather_weights(num_groups, bound, scratch);
    cut = bound_by_mass(scratch.candidates, count, bound, top_p * mass);
  }
  return cut;
}

// The token of a block at which the mass from its beginning exceeds the target, else the last one that has any.
int64_t draw_from_block(const float* weights, float cut, double target) {
  double mass = 0;
  int64_t last = 0;
  for (int64_t token = 0; token < kBlock; ++token) {
    if (weights[token] < cut || weights[token] == 0.0f) continue;
    last = token;
    mass += weights[token];
    if (mass > target) break;
  }
  return last;
}

// The block at which the mass exceeds the target, else the last one that has any; the target becomes the block's own.
int64_t draw_block(const double* block_mass, int64_t blocks, double& target) {
  double mass = 0, mass_before = 0;
  int64_t last = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    if (block_mass[block] == 0) continue;
    last = block;
    mass_before = mass;
    mass += block_mass[block];
    if (mass > target) break;
  }
  target -= mass_before;
  return last;
}

void sample_row(const SampleArgs& args, int64_t row, float* base) {
  const float* logits = args.logits + row * args.logits_stride;
  const int64_t size = args.vocab_size, blocks = num_blocks(size);
  const float best = best_logit(logits, size), temperature = args.temperature[row];
  if (temperature == 0 || !(best - best == 0)) {  // infinities and NaN have no distribution
    args.token_ids[row] = first_of(logits, size, best);
    return;
  }
  const Scratch scratch(base, size);
  const float scale = kLog2E / (temperature > kMinTemperature ? temperature : kMinTemperature);
  const float min_p = args.min_p[row];
  const bool has_cut = (args.top_k[row] > 0 && args.top_k[row] < size) || args.top_p[row] < 1;
  float cut = 0, weights_of_block[kBlock];
  if (has_cut) {
    weigh(logits, size, best, scale, min_p, scratch);
    cut = find_cut(size, args.top_k[row], args.top_p[row], scratch);
    for (int64_t block = 0; block < blocks; ++block)
      scratch.block_mass[block] = block_mass(scratch.weights + block * kBlock, cut);
  } else {
    for_blocks(logits, size, [&](int64_t block, const float* tokens) {
      weigh_block(tokens, best, scale, min_p, weights_of_block);
      scratch.block_mass[block] = block_mass(weights_of_block, 0);
    });
  }
  double total = 0;
  for (int64_t block = 0; block < blocks; ++block) total += scratch.block_mass[block];
  double target = args.uniform[row] * total;
  const int64_t block = draw_block(scratch.block_mass, blocks, target);
  const float* weights = scratch.weights + block * kBlock;
  if (!has_cut) {
    for_blocks(logits + block * kBlock, min_of(kBlock, size - block * kBlock), [&](int64_t, const float* tokens) {
      weigh_block(tokens, best, scale, min_p, weights_of_block);
    });
    weights = weights_of_block;
  }
  args.token_ids[row] = block * kBlock + draw_from_block(weights, cut, target);
}

}  // namespace

extern const SampleKernel kSampleKernel = {sample_row, scratch_floats};

}  // namespace OCTAVO_ISA
}  // namespace octavo
