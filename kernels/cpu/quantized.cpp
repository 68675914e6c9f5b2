// Entry points of products with quantised weights, called from Python through ctypes: the threads, scratch and checks.
// Knows no arithmetic: the kernels of the instruction set that the caller chose do that.
#include "quantized.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "quantized_tasks.h"
#include "threads.h"

namespace octavo {
namespace {

Status quantized_linear(const QuantizedLinearArgs& args) {
  const KernelSet* kernels = kernel_set(args.instruction_set);
  if (!kernels) return kUnsupported;
  const QuantizedWeight& weight = args.weight;
  float* scratch = thread_scratch(quantized_rows_floats(args.num_rows, weight.in_features));
  if (!scratch) return kOutOfMemory;
  const QuantizedRows rows = quantized_rows(scratch, args.num_rows, weight.in_features);
  parallel_for_rows(args.num_rows, weight.in_features, args.num_threads, [&](int64_t row) {
    kernels->quantized->quantize(args.inputs + row * args.input_stride, 0, rows.num_groups, rows, row);
  });
  const PanelTasks tasks(args.num_rows, num_panels(weight), args.num_threads);
  parallel_for(tasks.count, args.num_threads, [&](int64_t i) {
    const PanelTask task = tasks[i];
    float* out = args.out + task.first_row * weight.num_outputs + task.first_panel * kPanel;
    kernels->quantized->multiply(weight, rows, task, out, weight.num_outputs);
  });
  return kOk;
}

// The rows of a weight as they are, e.g. those of the token embedding.
Status embed(const EmbedArgs& args) {
  const KernelSet* kernels = kernel_set(args.instruction_set);
  if (!kernels) return kUnsupported;
  const QuantizedWeight& weight = args.weight;
  for (int64_t row = 0; row < args.num_rows; ++row)
    if (args.ids[row] < 0 || args.ids[row] >= weight.num_outputs) return kBadTokenId;
  parallel_for_rows(args.num_rows, weight.in_features, args.num_threads, [&](int64_t row) {
    kernels->quantized->read_output(weight, args.ids[row], args.factor, args.out + row * weight.in_features);
  });
  return kOk;
}

}  // namespace
}  // namespace octavo

extern "C" {

int32_t octavo_quantized_linear(const octavo::QuantizedLinearArgs* args) { return octavo::quantized_linear(*args); }

int32_t octavo_embed(const octavo::EmbedArgs* args) { return octavo::embed(*args); }

}  // extern "C"
