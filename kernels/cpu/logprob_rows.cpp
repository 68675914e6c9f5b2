// Log-probabilities of tokens of one row of logits, and its best tokens in order. Compiled once per instruction set,
// each into its own namespace (-DOCTAVO_ISA=...), so it uses nothing of the standard library that could be emitted as a
// shared inline function. Knows no threads and no batch.
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

// Scratch of one row.
struct Scratch {
  int64_t* candidate_ids;  // [num_blocks * kBlock]
  float* candidates;       // the same, their logits
  int32_t* group_keys;     // [num_blocks * kLanes]

  Scratch(float* base, int64_t vocab_size) {
    const int64_t blocks = num_blocks(vocab_size);
    candidate_ids = reinterpret_cast<int64_t*>(base);
    candidates = reinterpret_cast<float*>(candidate_ids + blocks * kBlock);
    group_keys = reinterpret_cast<int32_t*>(candidates + blocks * kBlock);
  }
};

int64_t scratch_floats(int64_t vocab_size) { return num_blocks(vocab_size) * (3 * kBlock + kLanes); }

// The maximum of each 16 logits as a key, and the sum of all weights.
double rank_groups(const float* logits, int64_t size, float best, int32_t* group_keys) {
  double total = 0;
  for_blocks(logits, size, [&](int64_t block, const float* tokens) {
    FloatVec largest = load(tokens), sum = {};
    for (int i = 0; i < kBlockVectors; ++i) {
      const FloatVec logit = load(tokens + i * kLanes);
      largest = max_of(logit, largest);
      sum += exp2_lanes((logit - best) * kLog2E);
    }
    total += lane_sum(sum);
    for (int lane = 0; lane < kLanes; ++lane) group_keys[block * kLanes + lane] = key_of(largest[lane]);
  });
  return total;
}

// Puts the tokens whose keys are not below `bound` among the candidates; returns their number.
int64_t gather_tokens(const float* logits, int64_t size, int32_t bound, const Scratch& scratch) {
  int64_t count = 0;
  for (int64_t group = 0; group < num_blocks(size) * kLanes; ++group) {
    if (scratch.group_keys[group] < bound) continue;
    const int64_t end = min_of(size, first_token(group) + kBlock);
    for (int64_t token = first_token(group); token < end; token += kLanes) {
      if (key_of(logits[token]) < bound) continue;
      scratch.candidates[count] = logits[token];
      scratch.candidate_ids[count++] = token;
    }
  }
  return count;
}

// Keeps the best `num_top` of the candidates in order, equal ones by their ids.
void sort_top(const Scratch& scratch, int64_t count, int64_t num_top, int64_t* top_ids, float* top_logits) {
  int64_t num_kept = 0;
  for (int64_t c = 0; c < count; ++c) {
    const float logit = scratch.candidates[c];
    const int64_t id = scratch.candidate_ids[c];
    const int32_t key = key_of(logit);
    int64_t place = num_kept;
    for (; place > 0; --place) {
      const int32_t other = key_of(top_logits[place - 1]);
      if (other > key || (other == key && top_ids[place - 1] < id)) break;
      if (place == num_top) continue;  // falls off the end
      top_logits[place] = top_logits[place - 1];
      top_ids[place] = top_ids[place - 1];
    }
    if (place == num_top) continue;
    top_logits[place] = logit;
    top_ids[place] = id;
    num_kept = min_of(num_kept + 1, num_top);
  }
}

void token_logprobs_row(const TokenLogprobsArgs& args, int64_t row, float* base) {
  const float* logits = args.logits + row * args.logits_stride;
  const int64_t size = args.vocab_size, num_top = args.num_top, num_groups = num_blocks(size) * kLanes;
  const Scratch scratch(base, size);
  const float best = best_logit(logits, size);
  const double log_total = __builtin_log(rank_groups(logits, size, best, scratch.group_keys));
  const auto logprob = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit) - best - log_total);
  };
  if (args.token_ids) args.logprobs[row] = logprob(logits[args.token_ids[row]]);
  if (num_top == 0) return;
  // As many groups have a token that is not below it.
  const int32_t bound = bound_by_count(scratch.group_keys, num_groups, num_top);
  const int64_t count = gather_tokens(logits, size, bound, scratch);
  int64_t* top_ids = args.top_ids + row * num_top;
  float* top_logprobs = args.top_logprobs + row * num_top;
  sort_top(scratch, count, num_top, top_ids, top_logprobs);
  for (int64_t i = 0; i < num_top; ++i) top_logprobs[i] = logprob(top_logprobs[i]);
}

}  // namespace

extern const LogprobKernel kLogprobKernel = {token_logprobs_row, scratch_floats};

}  // namespace OCTAVO_ISA
}  // namespace octavo
