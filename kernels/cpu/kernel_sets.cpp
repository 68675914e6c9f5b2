// Which instruction sets the build and the processor have. Knows no arithmetic and no threads.
#include "model_ops.h"
#include "native.h"
#include "paged_attention.h"

namespace octavo {

const KernelSet* kernel_set(int32_t instruction_set) {
#if defined(OCTAVO_X86_VARIANTS)
  static const KernelSet avx512_set = {&avx512::kTileKernel, &avx512::kLinearKernel, &avx512::kRowKernels};
  static const KernelSet avx2_set = {&avx2::kTileKernel, &avx2::kLinearKernel, &avx2::kRowKernels};
  __builtin_cpu_init();
  if (instruction_set == kAvx512) {
    const bool supported = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return supported ? &avx512_set : nullptr;
  }
  if (instruction_set == kAvx2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &avx2_set : nullptr;
#endif
  static const KernelSet generic_set = {&generic::kTileKernel, &generic::kLinearKernel, &generic::kRowKernels};
  return instruction_set == kGeneric ? &generic_set : nullptr;
}

}  // namespace octavo

extern "C" int32_t octavo_supports(int32_t instruction_set) { return octavo::kernel_set(instruction_set) != nullptr; }
