// Entry points of a decoder's operations besides attention, called from Python through ctypes: the threads and checks.
// Knows no arithmetic: the kernels of the instruction set that the caller chose do that.
#include "model_ops.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "threads.h"

namespace octavo {
namespace {

constexpr int64_t kRowsPerTask = 64;
constexpr int64_t kOutputsPerTask = 64;
constexpr int64_t kTasksPerThread = 8;  // enough for threads that others hold up to be helped out

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Status linear(const LinearArgs& args) {
  const KernelSet* kernels = kernel_set(args.instruction_set);
  if (!kernels) return kUnsupported;
  const int64_t row_tiles = ceil_div(args.num_rows, kRowsPerTask);
  const int64_t wanted = ceil_div(kTasksPerThread * args.num_threads, std::max<int64_t>(1, row_tiles));
  const int64_t step = std::clamp<int64_t>(ceil_div(args.num_outputs, wanted * 16) * 16, 16, kOutputsPerTask);
  const int64_t floats =
      kernels->linear->scratch_floats({0, std::min(args.num_rows, kRowsPerTask), 0, std::min(args.num_outputs, step)});
  std::atomic<bool> out_of_memory{false};
  // Row tiles of the same outputs follow one another: the weight's tile stays in the cache between them.
  parallel_for(row_tiles * ceil_div(args.num_outputs, step), args.num_threads, [&](int64_t i) {
    const int64_t row = i % row_tiles * kRowsPerTask, output = i / row_tiles * step;
    const LinearTask task = {row, std::min(kRowsPerTask, args.num_rows - row), output,
                             std::min(step, args.num_outputs - output)};
    float* scratch = thread_scratch(floats);
    if (scratch) kernels->linear->linear_tile(args, task, scratch);
    else out_of_memory = true;
  });
  return out_of_memory ? kOutOfMemory : kOk;
}

template <typename Args>
Status for_rows(const Args& args, int64_t num_rows, void (*RowKernels::*kernel)(const Args&, int64_t)) {
  const KernelSet* kernels = kernel_set(args.instruction_set);
  if (!kernels) return kUnsupported;
  parallel_for_rows(num_rows, args.size, args.num_threads, [&](int64_t row) { (kernels->rows->*kernel)(args, row); });
  return kOk;
}

Status rotate_and_write(const RotateAndWriteArgs& args) {
  const KernelSet* kernels = kernel_set(args.instruction_set);
  if (!kernels) return kUnsupported;
  for (int64_t token = 0; token < args.num_tokens; ++token)
    if (args.slot_mapping[token] >= args.num_blocks * args.block_size) return kBadSlot;
  std::atomic<bool> out_of_memory{false};
  const int64_t row_size = (args.num_q_heads + 2 * args.num_kv_heads) * args.head_dim;
  parallel_for_rows(args.num_tokens, row_size, args.num_threads, [&](int64_t token) {
    float* scratch = thread_scratch(2 * args.head_dim);
    if (scratch) kernels->rows->rotate_and_write(args, token, scratch);
    else out_of_memory = true;
  });
  return out_of_memory ? kOutOfMemory : kOk;
}

}  // namespace
}  // namespace octavo

extern "C" {

int32_t octavo_linear(const octavo::LinearArgs* args) { return octavo::linear(*args); }

int32_t octavo_rms_norm(const octavo::RmsNormArgs* args) {
  return octavo::for_rows(*args, args->num_rows, &octavo::RowKernels::rms_norm);
}

int32_t octavo_gate(const octavo::GateArgs* args) {
  return octavo::for_rows(*args, args->num_rows, &octavo::RowKernels::gate);
}

int32_t octavo_rotary_angles(const octavo::RotaryAnglesArgs* args) {
  return octavo::for_rows(*args, args->num_tokens, &octavo::RowKernels::rotary_angles);
}

int32_t octavo_soft_cap(const octavo::SoftCapArgs* args) {
  return octavo::for_rows(*args, args->num_rows, &octavo::RowKernels::soft_cap);
}

int32_t octavo_rotate_and_write(const octavo::RotateAndWriteArgs* args) { return octavo::rotate_and_write(*args); }

}  // extern "C"
