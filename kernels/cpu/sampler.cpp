// Entry points of the sampler, called from Python through ctypes: the threads, one row of logits at a time each.
// Knows no arithmetic: the kernels of the instruction set that the caller chose do that.
#include "sampler.h"

#include <atomic>
#include <cstdint>

#include "threads.h"

namespace octavo {
namespace {

template <typename Args, typename Kernel>
Status for_each_row(const Args& args, const Kernel* KernelSet::*kernel) {
  const KernelSet* kernels = kernel_set(args.instruction_set);
  if (!kernels) return kUnsupported;
  const int64_t floats = (kernels->*kernel)->scratch_floats(args.vocab_size);
  std::atomic<bool> out_of_memory{false};
  parallel_for(args.num_rows, args.num_threads, [&](int64_t row) {
    float* scratch = thread_scratch(floats);
    if (scratch) (kernels->*kernel)->row(args, row, scratch);
    else out_of_memory = true;
  });
  return out_of_memory ? kOutOfMemory : kOk;
}

}  // namespace
}  // namespace octavo

extern "C" {

int32_t octavo_sample(const octavo::SampleArgs* args) {
  return octavo::for_each_row(*args, &octavo::KernelSet::sampling);
}

int32_t octavo_token_logprobs(const octavo::TokenLogprobsArgs* args) {
  return octavo::for_each_row(*args, &octavo::KernelSet::logprobs);
}

}  // extern "C"
