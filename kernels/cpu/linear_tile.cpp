// One tile of a matrix product: some rows of inputs against some rows of a weight that lies as checkpoints have it,
// [out_features, in_features]. Compiled once per instruction set, each into its own namespace (-DOCTAVO_ISA=...), so it
// uses nothing of the standard library that could be emitted as a shared inline function. Knows no threads.
//
// Every output element has one vector of partial sums, lane i of which adds the products at k = i, i + lanes, ... in
// order; the lanes are then added as a tree, and blocks of kDepth products left to right. Nothing of this depends on
// which rows and outputs share the registers: a row's output is bitwise the same in a batch of any size.
#include <cstdint>
#include <cstring>

#ifndef OCTAVO_ISA
#define OCTAVO_ISA generic
#endif

#include "lanes.h"
#include "model_ops.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr int64_t kDepth = 1024;  // elements of k per block: 64 rows of inputs and 64 of the weight fit a level 2 cache
constexpr int kMaxRows = kLanes == 16 ? 4 : 2;  // 4 x 4 accumulators of 32 registers, 2 x 4 of 16
constexpr int kOutputs = 4;
constexpr int64_t kRowsWorthWidening = 32;  // from here on a 16-bit weight is widened once, not per use

// Stride of a block's rows in scratch: not a power of two, which would put all rows into the same cache sets.
constexpr int64_t kStride = kDepth + kLanes;

// sums[num_rows, num_outputs] (+)= inputs . weight^T over one block of depth.
template <typename Element>
struct Product {
  const float* inputs;    // [num_rows, depth] in rows of kStride, padded with zeros to whole vectors
  const Element* weight;  // [num_outputs, depth]
  int64_t weight_stride;
  float* sums;  // [num_rows, num_outputs]
  int64_t num_rows, num_outputs, depth;
  bool accumulates;
};

// The sums of Rows rows from `row` on and Outputs outputs from `output` on, one register of partial sums for each.
template <int Rows, int Outputs, bool Prefetches, typename Element>
void multiply_block(const Product<Element>& product, int64_t row, int64_t output) {
  const float* inputs = product.inputs + row * kStride;
  const Element* weight = product.weight + output * product.weight_stride;
  const int64_t stride = product.weight_stride, depth = product.depth;
  FloatVec sum[Rows * Outputs] = {};
  int64_t k = 0;
  for (; k + kLanes <= depth; k += kLanes) {
    FloatVec line[Rows];
    for (int r = 0; r < Rows; ++r) line[r] = load(inputs + r * kStride + k);
    for (int c = 0; c < Outputs; ++c) {
      if (Prefetches) __builtin_prefetch(weight + (Outputs + c) * stride + k);
      const FloatVec factor = widen(weight + c * stride + k);
      for (int r = 0; r < Rows; ++r) sum[r * Outputs + c] += line[r] * factor;
    }
  }
  if (k < depth) {
    for (int c = 0; c < Outputs; ++c) {
      const FloatVec factor = widen_partial(weight + c * stride + k, depth - k);
      for (int r = 0; r < Rows; ++r) sum[r * Outputs + c] += load(inputs + r * kStride + k) * factor;
    }
  }
  float totals[(Rows * Outputs + kLanes - 1) / kLanes * kLanes];
  for (int first = 0; first < Rows * Outputs; first += kLanes) {
    FloatVec group[kLanes];
    for (int i = 0; i < kLanes; ++i) group[i] = first + i < Rows * Outputs ? sum[first + i] : FloatVec{};
    store(totals + first, lane_sums(group));
  }
  for (int r = 0; r < Rows; ++r) {
    for (int c = 0; c < Outputs; ++c) {
      float& target = product.sums[(row + r) * product.num_outputs + output + c];
      target = product.accumulates ? target + totals[r * Outputs + c] : totals[r * Outputs + c];
    }
  }
}

// The first rows to use some lines of the weight fetch the next ones meanwhile: the others find both in the cache.
template <int Rows, int Outputs, typename Element>
void multiply_rows(const Product<Element>& product, int64_t row, int64_t output) {
  if (row == 0) multiply_block<Rows, Outputs, true>(product, row, output);
  else multiply_block<Rows, Outputs, false>(product, row, output);
}

template <int Outputs, typename Element>
void multiply_outputs(const Product<Element>& product, int64_t output) {
  int64_t row = 0;
  for (; row + kMaxRows <= product.num_rows; row += kMaxRows) multiply_rows<kMaxRows, Outputs>(product, row, output);
  switch (product.num_rows - row) {
    case 3: multiply_rows<3, Outputs>(product, row, output); break;
    case 2: multiply_rows<2, Outputs>(product, row, output); break;
    case 1: multiply_rows<1, Outputs>(product, row, output); break;
  }
}

template <typename Element>
void multiply(const Product<Element>& product) {
  int64_t output = 0;
  for (; output + kOutputs <= product.num_outputs; output += kOutputs) multiply_outputs<kOutputs>(product, output);
  for (; output < product.num_outputs; ++output) multiply_outputs<1>(product, output);
}

// Copies [num_rows, depth] into scratch as float32, each row padded with zeros to whole vectors.
template <typename Element>
void widen_rows(const Element* source, int64_t source_stride, int64_t num_rows, int64_t depth, float* target) {
  for (int64_t r = 0; r < num_rows; ++r, source += source_stride, target += kStride) {
    int64_t k = 0;
    for (; k + kLanes <= depth; k += kLanes) store(target + k, widen(source + k));
    if (k < depth) store(target + k, widen_partial(source + k, depth - k));
  }
}

struct Scratch {
  float *inputs, *sums, *weight;

  Scratch(float* base, const LinearTask& task) {
    inputs = base;
    sums = inputs + task.num_rows * kStride;
    weight = sums + round_up(task.num_rows * task.num_outputs, kLanes);
  }
};

int64_t scratch_floats(const LinearTask& largest) {
  return (largest.num_rows + largest.num_outputs) * kStride +
         round_up(largest.num_rows * largest.num_outputs, kLanes);
}

template <typename Element>
void store_out(const LinearArgs& args, const LinearTask& task, const float* sums) {
  const Element* bias = static_cast<const Element*>(args.bias);
  for (int64_t r = 0; r < task.num_rows; ++r) {
    Element* out = static_cast<Element*>(args.out) + (task.first_row + r) * args.num_outputs + task.first_output;
    for (int64_t n = 0; n < task.num_outputs; ++n) {
      const float shift = bias ? widen_one(bias[task.first_output + n]) : 0.0f;
      out[n] = narrow(sums[r * task.num_outputs + n] + shift, static_cast<Element*>(nullptr));
    }
  }
}

template <typename Element>
void multiply_tile(const LinearArgs& args, const LinearTask& task, const Scratch& scratch) {
  const Element* inputs = static_cast<const Element*>(args.inputs) + task.first_row * args.input_stride;
  const Element* weight = static_cast<const Element*>(args.weight) + task.first_output * args.in_features;
  const bool widens_weight = sizeof(Element) < sizeof(float) && task.num_rows >= kRowsWorthWidening;
  for (int64_t k = 0; k < args.in_features; k += kDepth) {
    const int64_t depth = min_of(kDepth, args.in_features - k);
    widen_rows(inputs + k, args.input_stride, task.num_rows, depth, scratch.inputs);
    if (widens_weight) {
      widen_rows(weight + k, args.in_features, task.num_outputs, depth, scratch.weight);
      multiply(Product<float>{scratch.inputs, scratch.weight, kStride, scratch.sums, task.num_rows, task.num_outputs,
                              depth, k > 0});
    } else {
      multiply(Product<Element>{scratch.inputs, weight + k, args.in_features, scratch.sums, task.num_rows,
                                task.num_outputs, depth, k > 0});
    }
  }
  store_out<Element>(args, task, scratch.sums);
}

void linear_tile(const LinearArgs& args, const LinearTask& task, float* base) {
  const Scratch scratch(base, task);
  switch (args.element_type) {
    case kFloat32: multiply_tile<float>(args, task, scratch); break;
    case kBFloat16: multiply_tile<BFloat16>(args, task, scratch); break;
    case kFloat16: multiply_tile<Float16>(args, task, scratch); break;
  }
}

}  // namespace

extern const LinearKernel kLinearKernel = {linear_tile, scratch_floats};

}  // namespace OCTAVO_ISA
}  // namespace octavo
