// What a call that runs all layers of a decoder takes, in C++ and in Python (native_library.py mirrors the structs).
// Hidden states are float32, weights quantised; families differ in which pointers are null.
#pragma once

#include <cstdint>

#include "model_ops.h"
#include "paged_attention.h"
#include "quantized.h"

namespace octavo {

struct LayerWeights {
  QuantizedWeight qkv, output, gate_up, down;
  const float* attention_norm;         // [hidden_size]
  const float* mlp_norm;               // [hidden_size]
  const float* attention_output_norm;  // [hidden_size], of what attention adds; or null
  const float* mlp_output_norm;        // [hidden_size], of what the MLP adds; or null
  const float* head_norm;              // [num_q_heads + num_kv_heads, head_dim], or null
  int64_t rope;                        // which of the angles
  int64_t sliding_window;              // 0 = none
};

// Where the keys and values of one layer lie; strides are those of every layer.
struct LayerCache {
  void* key;
  void* value;
  float* key_scale;  // null but of a quantised cache
  float* value_scale;
};

// The parts of a layer whose time can be told, in the order of `LAYER_PARTS` in native_library.py.
enum LayerPart : int32_t { kNorms, kProducts, kGatedProducts, kRotation, kAttention, kRounding, kNumLayerParts };

struct DecoderArgs {
  const LayerWeights* layers;  // [num_layers]
  const LayerCache* caches;    // [num_layers]
  const float* final_norm;     // [hidden_size]
  const float* residual;       // [num_tokens, hidden_size], contiguous: embedded tokens
  const int64_t* wanted;       // [num_wanted] tokens whose hidden states are asked for, ascending; null = all
  float* out;                  // [num_tokens, hidden_size], contiguous: normed hidden states of the wanted tokens
  const float* cos[2];         // [num_tokens, head_dim / 2] of each kind of rotary embedding, contiguous
  const float* sin[2];
  RotateAndWriteArgs write;  // but for pointers and norms that differ between layers
  AttendArgs attend;         // the same
  double* seconds;           // [kNumLayerParts], to which the time of each part is added; null = not measured
  int64_t num_layers, num_tokens, num_wanted, hidden_size, intermediate_size;
  float eps;
  int32_t activation, instruction_set, num_threads;
};

}  // namespace octavo
