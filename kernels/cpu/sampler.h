// The types that cross between the entry points of the sampler (sampler.cpp), its kernels (sampler_rows.cpp and
// logprob_rows.cpp, compiled once per instruction set) and Python (native_library.py mirrors the argument structs field
// by field). Every result of a row depends on that row's inputs alone, bit for bit.
#pragma once

#include <cstdint>

#include "native.h"

namespace octavo {

struct SampleArgs {
  const float* logits;       // [num_rows, vocab_size], vocab_size contiguous
  const float* temperature;  // [num_rows], 0 = greedy
  const int64_t* top_k;      // [num_rows], 0 = off
  const float* top_p;        // [num_rows], 1 = off
  const float* min_p;        // [num_rows], 0 = off
  const double* uniform;     // [num_rows] in [0, 1)
  int64_t* token_ids;        // [num_rows], written
  int64_t num_rows, vocab_size, logits_stride;
  int32_t instruction_set, num_threads;
};

struct TokenLogprobsArgs {
  const float* logits;       // [num_rows, vocab_size], vocab_size contiguous
  const int64_t* token_ids;  // [num_rows], each below vocab_size; null = none
  float* logprobs;           // [num_rows], of token_ids, written; null without those
  int64_t* top_ids;          // [num_rows, num_top], contiguous, written, best first
  float* top_logprobs;       // the same
  int64_t num_rows, vocab_size, logits_stride, num_top;  // num_top is at most vocab_size
  int32_t instruction_set, num_threads;
};

struct SampleKernel {
  void (*row)(const SampleArgs& args, int64_t row, float* scratch);
  int64_t (*scratch_floats)(int64_t vocab_size);  // floats that one thread needs, at a 64-byte boundary
};

struct LogprobKernel {
  void (*row)(const TokenLogprobsArgs& args, int64_t row, float* scratch);
  int64_t (*scratch_floats)(int64_t vocab_size);
};

namespace generic { extern const SampleKernel kSampleKernel; extern const LogprobKernel kLogprobKernel; }
namespace avx2 { extern const SampleKernel kSampleKernel; extern const LogprobKernel kLogprobKernel; }
namespace avx512 { extern const SampleKernel kSampleKernel; extern const LogprobKernel kLogprobKernel; }

}  // namespace octavo
