// What all native CPU kernels share: codes that Python passes, and the kernels of one instruction set.
// Every kernel is compiled once per instruction set, into a namespace of that name, and reached through its KernelSet.
// Knows no torch: pointers, strides in elements, and plain integers.
#pragma once

#include <cstdint>

namespace octavo {

// The last two only in a KV cache, with a float32 scale for each head of each slot.
enum ElementType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3, kFloat8E4M3 = 4 };

inline bool is_quantised(int32_t type) { return type == kInt8 || type == kFloat8E4M3; }
inline int64_t element_size(int32_t type) { return type == kFloat32 ? 4 : is_quantised(type) ? 1 : 2; }

// kAvx512Vnni adds int8 dot products to kAvx512, kAvx512BF16 those of bfloat16 to that.
enum InstructionSet : int32_t { kGeneric = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Vnni = 3, kAvx512BF16 = 4 };

enum Status : int32_t { kOk = 0, kBadBlockId = 1, kBadSlot = 2, kBadRow = 3, kOutOfMemory = 4, kUnsupported = 5, kBadTokenId = 6 };

struct TileKernel;    // paged_attention.h
struct LinearKernel;  // model_ops.h
struct RowKernels;    // model_ops.h
struct QuantizedKernel;  // quantized.h
struct SampleKernel;     // sampler.h
struct LogprobKernel;    // sampler.h

struct KernelSet {
  const TileKernel* attention;
  const LinearKernel* linear;
  const RowKernels* rows;
  const QuantizedKernel* quantized;
  const SampleKernel* sampling;
  const LogprobKernel* logprobs;
};

// The kernels of an instruction set, or null where the processor or the build lacks it.
const KernelSet* kernel_set(int32_t instruction_set);

}  // namespace octavo
