// Which instruction sets the build and the processor have, and which version of the argument structs. Knows no
// arithmetic and no threads.
#include "decoder_layers.h"
#include "model_ops.h"
#include "native.h"
#include "paged_attention.h"
#include "quantized.h"
#include "sampler.h"

namespace octavo {

const KernelSet* kernel_set(int32_t instruction_set) {
  static const KernelSet generic_set = {&generic::kTileKernel, &generic::kLinearKernel, &generic::kRowKernels,
                                        &generic::kQuantizedKernel,
                                        &generic::kSampleKernel, &generic::kLogprobKernel};
#if defined(OCTAVO_X86_VARIANTS)
  static const KernelSet avx2_set = {&avx2::kTileKernel, &avx2::kLinearKernel, &avx2::kRowKernels,
                                     &avx2::kQuantizedKernel,
                                     &avx2::kSampleKernel, &avx2::kLogprobKernel};
  static const KernelSet avx512_set = {&avx512::kTileKernel, &avx512::kLinearKernel, &avx512::kRowKernels,
                                       &avx512::kQuantizedKernel,
                                       &avx512::kSampleKernel, &avx512::kLogprobKernel};
  static const KernelSet avx512_vnni_set = {&avx512::kTileKernel, &avx512::kLinearKernel, &avx512::kRowKernels,
                                            &avx512_vnni::kQuantizedKernel,
                                            &avx512::kSampleKernel, &avx512::kLogprobKernel};
  static const KernelSet avx512_bf16_set = {&avx512_bf16::kTileKernel, &avx512::kLinearKernel, &avx512::kRowKernels,
                                            &avx512_vnni::kQuantizedKernel,
                                            &avx512::kSampleKernel, &avx512::kLogprobKernel};
  __builtin_cpu_init();
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
  switch (instruction_set) {
    case kAvx512BF16: return has_vnni && __builtin_cpu_supports("avx512bf16") ? &avx512_bf16_set : nullptr;
    case kAvx512Vnni: return has_vnni ? &avx512_vnni_set : nullptr;
    case kAvx512: return has_avx512 ? &avx512_set : nullptr;
    case kAvx2: {
      const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
      return has_avx2 && __builtin_cpu_supports("f16c") ? &avx2_set : nullptr;
    }
  }
#endif
  return instruction_set == kGeneric ? &generic_set : nullptr;
}

}  // namespace octavo

// Python mirrors the structs field by field: a library of another version is told by their size before it is called.
template <typename... Args>
constexpr int64_t bytes_of() { return (static_cast<int64_t>(sizeof(Args)) + ...); }

extern "C" int64_t octavo_argument_bytes() {
  using namespace octavo;
  return bytes_of<WriteKVArgs, AttendArgs, RotateAndWriteArgs, LinearArgs, RmsNormArgs, GateArgs, RotaryAnglesArgs,
                  SoftCapArgs, SampleArgs, TokenLogprobsArgs, QuantizedLinearArgs, EmbedArgs, DecoderArgs, LayerWeights,
                  LayerCache>();
}

extern "C" int32_t octavo_supports(int32_t instruction_set) { return octavo::kernel_set(instruction_set) != nullptr; }
