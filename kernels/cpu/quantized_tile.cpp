// Products of int8 rows with a quantised weight, one task at a time: exact int32 sums of each group of inputs, then
// scaled and added up in float32, group after group. Compiled once per instruction set, each into its own namespace
// (-DOCTAVO_ISA=...), so it uses nothing of the standard library that could be emitted as a shared inline function.
// Knows no threads. The order of a row's sums does not depend on which rows and outputs share the registers.
#include <cstdint>
#include <cstring>

#ifndef OCTAVO_ISA
#define OCTAVO_ISA generic
#endif

#include "int8_dot.h"
#include "quantized.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr int kVectors = kPanel / kLanes;  // of one panel
constexpr int64_t kStepBytes = 4 * kPanel;
// Registers: a vector of int32 and one of float32 for each row and vector of outputs, beside the codes and scales.
constexpr int kMaxRows = kLanes == 16 ? kRowTile : 2;
constexpr int kMaxPanels = kLanes == 16 ? 2 : 1;

// ---- inputs ----

// A row in its tile.
struct RowPlace {
  int64_t first_row, num_rows, index;  // of the tile, and the row's index in it

  RowPlace(const QuantizedRows& rows, int64_t row)
      : first_row(row / kRowTile * kRowTile), num_rows(min_of(kRowTile, rows.num_rows - first_row)),
        index(row - first_row) {}
};

void quantize_row(const float* inputs, int64_t in_features, int64_t group_size, const QuantizedRows& rows, int64_t row) {
  typedef int8_t CodeVec __attribute__((vector_size(kLanes)));
  const RowPlace place(rows, row);
  const int64_t num_groups = in_features / group_size;
  int8_t* codes = rows.codes + place.first_row * in_features + 4 * place.index;
  for (int64_t g = 0; g < num_groups; ++g, inputs += group_size) {
    FloatVec largest = {};
    for (int64_t k = 0; k < group_size; k += kLanes) {
      const FloatVec x = k + kLanes <= group_size ? load(inputs + k) : widen_partial(inputs + k, group_size - k);
      largest = max_of(largest, x < 0.0f ? -x : x);
    }
    const float limit = lane_max(largest);
    const float factor = limit > 0.0f ? 127.0f / limit : 0.0f;
    IntVec total = {};
    for (int64_t k = 0; k < group_size; k += kLanes) {
      const int64_t count = min_of(kLanes, group_size - k);
      const FloatVec x = count == kLanes ? load(inputs + k) : widen_partial(inputs + k, count);
      const FloatVec shifted = x * factor + 0x1.8p23f;  // the sum's last bits are the nearest integer, ties to even
      const IntVec code = (IntVec)shifted - (IntVec)splat(0x1.8p23f);
      total += code;
      const CodeVec narrow = __builtin_convertvector(code, CodeVec);
      int8_t lanes[kLanes];
      memcpy(lanes, &narrow, kLanes);
      for (int64_t i = 0; i < count; i += 4, codes += 4 * place.num_rows) memcpy(codes, lanes + i, 4);
    }
    int32_t sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += total[i];
    const int64_t group = place.first_row * num_groups + g * place.num_rows + place.index;
    rows.scales[group] = limit / 127.0f;
    rows.sums[group] = limit / 127.0f * static_cast<float>(sum);
    rows.offsets[group] = -128 * sum;
  }
}

// ---- products ----

template <int Columns>
void store_row(const QuantizedWeight& weight, const FloatVec* total, int64_t output, float* out) {
  for (int c = 0; c < Columns; ++c, output += kLanes) {
    const int64_t count = weight.num_outputs - output;
    if (count >= kLanes) {
      store(out + output, weight.bias ? total[c] + load(weight.bias + output) : total[c]);
    } else {
      for (int64_t i = 0; i < count; ++i) out[output + i] = total[c][i] + (weight.bias ? weight.bias[output + i] : 0.0f);
    }
  }
}

// The products of Rows rows of one tile, from `row` on, with Panels panels from `panel` on.
template <int Rows, int Panels, int Bits>
void multiply_tile(const QuantizedWeight& weight, const QuantizedRows& rows, int64_t row, int64_t panel, float* out) {
  constexpr int Columns = Panels * kVectors;
  const RowPlace place(rows, row);
  const int64_t tile_rows = kMaxRows == kRowTile ? Rows : place.num_rows;
  const int64_t group_size = weight.group_size, num_groups = weight.in_features / group_size;
  const int64_t group_bytes = group_size * kPanel * Bits / 8, panel_bytes = num_groups * group_bytes;
  const uint8_t* codes = weight.codes + panel * panel_bytes;
  const uint16_t* scales = weight.scales + panel * num_groups * kPanel;
  const uint16_t* minimums = weight.minimums + panel * num_groups * kPanel;
  const int8_t* inputs = rows.codes + place.first_row * weight.in_features + 4 * place.index;
  int64_t group = place.first_row * num_groups + place.index;  // of the first row
  FloatVec total[Rows][Columns] = {};
  for (int64_t g = 0; g < num_groups; ++g) {
    IntVec sum[Rows][Columns];
    for (int r = 0; r < Rows; ++r)
      for (int c = 0; c < Columns; ++c)
        sum[r][c] = Bits == 8 && kKeepsCentre ? rows.offsets[group + r] - IntVec{} : IntVec{};
    for (int64_t b = 0; b < group_bytes; b += kStepBytes, inputs += 4 * tile_rows) {
      for (int c = 0; c < Columns; ++c) {
        const ByteVec code = load_bytes(codes + c / kVectors * panel_bytes + b + c % kVectors * 4 * kLanes);
        if constexpr (Bits == 8) {
          for (int r = 0; r < Rows; ++r) sum[r][c] = dot_of_8_bits(sum[r][c], code, splat_codes(inputs + 4 * r));
        } else {
          const ByteVec low = low_halves(code), high = high_halves(code);
          for (int r = 0; r < Rows; ++r) {
            const IntVec first = splat_codes(inputs + 4 * r), second = splat_codes(inputs + 4 * (tile_rows + r));
            sum[r][c] = dot_of_4_bits(dot_of_4_bits(sum[r][c], low, first), high, second);
          }
        }
      }
      if constexpr (Bits == 4) inputs += 4 * tile_rows;
    }
    for (int c = 0; c < Columns; ++c) {
      const int64_t of_group = c / kVectors * num_groups * kPanel + c % kVectors * kLanes;
      const FloatVec scale = widen_halves(scales + of_group);
      FloatVec minimum;
      if constexpr (Bits == 4) minimum = widen_halves(minimums + of_group);
      for (int r = 0; r < Rows; ++r) {
        total[r][c] += __builtin_convertvector(sum[r][c], FloatVec) * rows.scales[group + r] * scale;
        if constexpr (Bits == 4) total[r][c] += minimum * rows.sums[group + r];
      }
    }
    codes += group_bytes;
    scales += kPanel;
    minimums += kPanel;
    group += tile_rows;
  }
  for (int r = 0; r < Rows; ++r) store_row<Columns>(weight, total[r], panel * kPanel, out + (row + r) * weight.num_outputs);
}

// The task begins at a tile of rows, so that no register tile spans two of them.
template <int Panels, int Bits>
void multiply_rows(const QuantizedWeight& weight, const QuantizedRows& rows, const PanelTask& task, int64_t panel,
                   float* out) {
  static_assert(kRowTile % kMaxRows == 0);
  int64_t row = task.first_row;
  const int64_t end = row + task.num_rows;
  for (; row + kMaxRows <= end; row += kMaxRows) multiply_tile<kMaxRows, Panels, Bits>(weight, rows, row, panel, out);
  switch (end - row) {
    case 5: multiply_tile<5, Panels, Bits>(weight, rows, row, panel, out); break;
    case 4: multiply_tile<4, Panels, Bits>(weight, rows, row, panel, out); break;
    case 3: multiply_tile<3, Panels, Bits>(weight, rows, row, panel, out); break;
    case 2: multiply_tile<2, Panels, Bits>(weight, rows, row, panel, out); break;
    case 1: multiply_tile<1, Panels, Bits>(weight, rows, row, panel, out); break;
  }
}

template <int Bits>
void multiply_panels(const QuantizedWeight& weight, const QuantizedRows& rows, const PanelTask& task, float* out) {
  int64_t panel = task.first_panel;
  const int64_t end = panel + task.num_panels;
  for (; panel + kMaxPanels <= end; panel += kMaxPanels) multiply_rows<kMaxPanels, Bits>(weight, rows, task, panel, out);
  for (; panel < end; ++panel) multiply_rows<1, Bits>(weight, rows, task, panel, out);
}

void multiply(const QuantizedWeight& weight, const QuantizedRows& rows, const PanelTask& task, float* out) {
  if (weight.minimums) multiply_panels<4>(weight, rows, task, out);
  else multiply_panels<8>(weight, rows, task, out);
}

void read_output(const QuantizedWeight& weight, int64_t output, float factor, float* values) {
  const int64_t num_groups = weight.in_features / weight.group_size, bits = weight.minimums ? 4 : 8;
  const int64_t group_bytes = weight.group_size * kPanel * bits / 8, panel = output / kPanel, lane = output % kPanel;
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t group = panel * num_groups + g;
    const uint8_t* codes = weight.codes + group * group_bytes + 4 * lane;
    const float scale = widen_one(Float16{weight.scales[group * kPanel + lane]});
    const float minimum = bits == 4 ? widen_one(Float16{weight.minimums[group * kPanel + lane]}) : 0.0f;
    for (int64_t k = 0; k < weight.group_size; ++k) {
      const int64_t step = k / 4;
      const int code = bits == 8 ? codes[step * kStepBytes + k % 4] - 128
                                 : codes[step / 2 * kStepBytes + k % 4] >> 4 * (step % 2) & 15;
      values[g * weight.group_size + k] = factor * (scale * static_cast<float>(code) + minimum);
    }
  }
}

}  // namespace

extern const QuantizedKernel kQuantizedKernel = {quantize_row, multiply, read_output};

}  // namespace OCTAVO_ISA
}  // namespace octavo
