// The types that cross between the entry points of a decoder's operations (model_ops.cpp), their kernels
// (linear_tile.cpp and row_kernels.cpp, compiled once per instruction set) and Python (native_library.py mirrors the argument
// structs field by field). Every result of a row depends on that row's inputs alone, bit for bit.
#pragma once

#include <cstdint>

#include "native.h"

namespace octavo {

struct LinearArgs {
  const void* inputs;  // [num_rows, in_features], in_features contiguous
  const void* weight;  // [num_outputs, in_features], contiguous
  const void* bias;    // [num_outputs], or null
  void* out;           // [num_rows, num_outputs], contiguous
  int64_t num_rows, num_outputs, in_features, input_stride;
  int32_t element_type, instruction_set, num_threads;
};

struct RmsNormArgs {
  const void* inputs;    // [num_rows, size], contiguous
  const void* residual;  // [num_rows, size], contiguous, added to the inputs first; or null
  const float* weight;   // [size]
  void* out;             // [num_rows, size], contiguous
  void* total;           // [num_rows, size], contiguous, the sum; null without a residual
  int64_t num_rows, size;
  float eps;
  int32_t element_type, instruction_set, num_threads;
};

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

struct GateArgs {
  const void* gate_up;  // [num_rows, 2 * size], contiguous
  void* out;            // [num_rows, size], contiguous
  int64_t num_rows, size;
  int32_t activation, element_type, instruction_set, num_threads;
};

struct RotaryAnglesArgs {
  const int64_t* positions;         // [num_tokens]
  const float* inverse_frequencies;  // [size]
  float* cos;                       // [num_tokens, size], contiguous
  float* sin;
  int64_t num_tokens, size;
  float magnitude;
  int32_t instruction_set, num_threads;
};

struct SoftCapArgs {
  const float* scores;  // [num_rows, size], contiguous
  float* out;
  int64_t num_rows, size;
  float cap;
  int32_t instruction_set, num_threads;
};

struct RotateAndWriteArgs {
  const void* heads;         // [num_tokens, num_q_heads + 2 * num_kv_heads, head_dim], head_dim contiguous
  const float* cos;          // [num_tokens, head_dim / 2], contiguous
  const float* sin;
  const float* norm_weight;  // [num_q_heads + num_kv_heads, head_dim], contiguous; null = no norm
  void* query;               // [num_tokens, num_q_heads, head_dim], contiguous
  void* key_cache;           // [num_blocks, num_kv_heads, block_size, head_dim], head_dim contiguous
  void* value_cache;
  float* key_scale;  // [num_blocks, num_kv_heads, block_size] of an int8 or float8 cache, else null
  float* value_scale;
  const int64_t* slot_mapping;  // [num_tokens], -1 = not written
  int64_t num_tokens, num_q_heads, num_kv_heads, head_dim, num_blocks, block_size;
  int64_t heads_strides[2];                              // token, head
  int64_t key_cache_strides[3], value_cache_strides[3];  // block, head, slot
  int64_t key_scale_strides[3], value_scale_strides[3];  // the same
  float norm_eps;
  int32_t heads_type, query_type, cache_type, instruction_set, num_threads;
};

struct LinearTask {
  int64_t first_row, num_rows, first_output, num_outputs;
};

struct LinearKernel {
  void (*linear_tile)(const LinearArgs& args, const LinearTask& task, float* scratch);
  int64_t (*scratch_floats)(const LinearTask& largest);  // floats that one thread needs, at a 64-byte boundary
};

struct WriteKVArgs;  // paged_attention.h

struct RowKernels {
  void (*rms_norm)(const RmsNormArgs& args, int64_t row);
  void (*gate)(const GateArgs& args, int64_t row);
  void (*rotary_angles)(const RotaryAnglesArgs& args, int64_t token);
  void (*soft_cap)(const SoftCapArgs& args, int64_t row);
  void (*rotate_and_write)(const RotateAndWriteArgs& args, int64_t token, float* scratch);  // 2 * head_dim floats
  void (*write_kv)(const WriteKVArgs& args, int64_t token, float* scratch);                  // head_dim floats
};

namespace generic { extern const LinearKernel kLinearKernel; extern const RowKernels kRowKernels; }
namespace avx2 { extern const LinearKernel kLinearKernel; extern const RowKernels kRowKernels; }
namespace avx512 { extern const LinearKernel kLinearKernel; extern const RowKernels kRowKernels; }

}  // namespace octavo
