// The types of products with quantised weights: between their entry points (quantized.cpp), their kernels
// (quantized_tile.cpp, compiled once per instruction set) and Python (native_library.py mirrors the argument structs).
// The layout of a weight is that of kernels/quantized_weight.py. A row's result depends on that row alone, bit for bit.
#pragma once

#include <cstdint>

#include "native.h"

namespace octavo {

constexpr int64_t kPanel = 16;  // outputs that lie side by side
constexpr int64_t kGroup = 32;  // inputs that share a scale

constexpr int64_t kRowTile = 6;  // rows of inputs that lie side by side: those that share a weight in the registers

// Rows of inputs, rounded to int8 in groups. Tile t holds the n rows from row 6 t on, six but for the last tile:
// inputs 4 s to 4 s + 3 of its row r lie at codes[6 t * 32 * num_groups + 4 * (s * n + r)], and what belongs to its group g
// at [6 t * num_groups + g * n + r].
struct QuantizedRows {
  int8_t* codes;     // -127 to 127
  float* scales;     // max|x| / 127 of the group
  float* sums;       // scale * sum of the codes
  int32_t* offsets;  // -128 * sum of the codes
  int64_t num_rows, num_groups;
};

struct QuantizedWeight {
  const uint8_t* codes;      // [num_panels, num_groups, 32 * 16 * bits / 8]
  const uint16_t* scales;    // [num_panels, num_scales, 16] float16
  const uint16_t* minimums;  // the same of a 4-bit weight; null of an 8-bit one
  const float* bias;         // [num_outputs], or null
  int64_t num_outputs, in_features;
  int64_t num_scales;  // of an output: one for each group, or one for all of an 8-bit weight
};

struct QuantizedLinearArgs {
  QuantizedWeight weight;
  const float* inputs;  // [num_rows, in_features], in_features contiguous
  float* out;           // [num_rows, num_outputs], contiguous
  int64_t num_rows, input_stride;
  int32_t instruction_set, num_threads;
};

struct EmbedArgs {
  QuantizedWeight weight;
  const int64_t* ids;  // [num_rows]
  float* out;          // [num_rows, in_features], contiguous
  int64_t num_rows;
  float factor;  // multiplies every value
  int32_t instruction_set, num_threads;
};

// Rows and panels of a product that one thread computes at once.
struct PanelTask {
  int64_t first_row, num_rows, first_panel, num_panels;
};

struct QuantizedKernel {
  // Quantises [32 * num_groups] inputs into the groups of row `row` from `first_group` on.
  void (*quantize)(const float* inputs, int64_t first_group, int64_t num_groups, const QuantizedRows& rows, int64_t row);
  // The products of a task, in rows of `stride`; `out` is the place of its first row and first output.
  void (*multiply)(const QuantizedWeight& weight, const QuantizedRows& rows, const PanelTask& task, float* out,
                   int64_t stride);
  // The values of one output's weights times `factor`, [in_features].
  void (*read_output)(const QuantizedWeight& weight, int64_t output, float factor, float* values);
};

namespace generic { extern const QuantizedKernel kQuantizedKernel; }
namespace avx2 { extern const QuantizedKernel kQuantizedKernel; }
namespace avx512 { extern const QuantizedKernel kQuantizedKernel; }
namespace avx512_vnni { extern const QuantizedKernel kQuantizedKernel; }

}  // namespace octavo
