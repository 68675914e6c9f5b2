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
constexpr int64_t kPrefetchBytes = 4096;  // ahead of what is multiplied: measured at one row
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

// Rounds one group and returns the sum of its codes, which go to every `stride`-th place of four bytes.
int32_t quantize_group(const float* inputs, float factor, int8_t* codes, int64_t stride) {
  typedef int8_t CodeVec __attribute__((vector_size(kLanes)));
  IntVec total = {};
  for (int64_t k = 0; k < kGroup; k += kLanes) {
    const FloatVec shifted = load(inputs + k) * factor + 0x1.8p23f;  // the last bits are the nearest integer, ties even
    const IntVec code = (IntVec)shifted - (IntVec)splat(0x1.8p23f);
    total += code;
    const CodeVec narrow = __builtin_convertvector(code, CodeVec);
    int8_t lanes[kLanes];
    memcpy(lanes, &narrow, kLanes);
    for (int i = 0; i < kLanes; i += 4, codes += 4 * stride) memcpy(codes, lanes + i, 4);
  }
  return lane_sum(total);
}

void quantize(const float* inputs, int64_t first_group, int64_t num_groups, const QuantizedRows& rows, int64_t row) {
  const RowPlace place(rows, row);
  int64_t group = place.first_row * rows.num_groups + first_group * place.num_rows + place.index;
  int8_t* codes = rows.codes + (group - place.index) * kGroup + 4 * place.index;
  for (int64_t g = 0; g < num_groups; ++g, inputs += kGroup, group += place.num_rows) {
    IntVec largest = {};  // magnitudes as integers, in whose order NaN is above all numbers: it must not get lost
    for (int64_t k = 0; k < kGroup; k += kLanes) largest = max_of(largest, (IntVec)load(inputs + k) & INT32_MAX);
    const float limit = ((FloatVec)largest_lane(largest))[0];
    const int32_t sum = quantize_group(inputs, limit > 0.0f ? 127.0f / limit : 0.0f, codes, place.num_rows);
    codes += kGroup * place.num_rows;
    rows.scales[group] = limit / 127.0f;
    rows.sums[group] = limit / 127.0f * static_cast<float>(sum);
    rows.offsets[group] = static_cast<int32_t>(-128u * static_cast<uint32_t>(sum));  // of a broken input any number
  }
}

// ---- products ----

// Stores rows of whole panels but for what lies past the last output. Apart from the tile, so that its registers stay so.
template <int Rows, int Columns>
__attribute__((noinline)) void store_part(const float (&values)[Rows][Columns * kLanes], int64_t count, float* out,
                                          int64_t stride) {
  for (int r = 0; r < Rows; ++r) memcpy(out + r * stride, values[r], count * sizeof(float));
}

// How the codes of a weight are scaled.
enum class Scaling { kFourBitGroups, kEightBitGroups, kEightBitOutputs };

// The products of Rows rows of one tile, from `row` on, with Panels panels from `panel` on.
template <int Rows, int Panels, Scaling Format>
void multiply_tile(const QuantizedWeight& weight, const QuantizedRows& rows, int64_t row, int64_t panel, float* out,
                   int64_t stride) {
  constexpr int Columns = Panels * kVectors;
  constexpr int Bits = Format == Scaling::kFourBitGroups ? 4 : 8;
  constexpr int64_t group_bytes = kGroup * kPanel * Bits / 8;
  // The lines of the weight that a few rows use are gone before the processor's own prefetchers have found them.
  constexpr bool prefetches = Rows * Panels <= 8;
  const RowPlace place(rows, row);
  const int64_t tile_rows = kMaxRows == kRowTile ? Rows : place.num_rows;
  const int64_t num_groups = rows.num_groups, panel_bytes = num_groups * group_bytes;
  const uint8_t* codes = weight.codes + panel * panel_bytes;
  const uint16_t* scales = weight.scales + panel * weight.num_scales * kPanel;
  const uint16_t* minimums = weight.minimums + panel * weight.num_scales * kPanel;
  const int8_t* inputs = rows.codes + place.first_row * kGroup * num_groups + 4 * place.index;
  int64_t group = place.first_row * num_groups + place.index;  // of the first row
  FloatVec total[Rows][Columns];
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < Columns; ++c) total[r][c] = FloatVec{};
  for (int64_t g = 0; g < num_groups; ++g) {
    IntVec sum[Rows][Columns];
    for (int r = 0; r < Rows; ++r)
      for (int c = 0; c < Columns; ++c)
        sum[r][c] = Bits == 8 && kKeepsCentre ? rows.offsets[group + r] - IntVec{} : IntVec{};
    for (int64_t b = 0; b < group_bytes; b += kStepBytes, inputs += 4 * tile_rows) {
      for (int c = 0; c < Columns; ++c) {
        const uint8_t* line = codes + c / kVectors * panel_bytes + b + c % kVectors * 4 * kLanes;
        if constexpr (prefetches)
          if (c % kVectors == 0) __builtin_prefetch(line + kPrefetchBytes);
        const ByteVec code = load_bytes(line);
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
      FloatVec scale, minimum;
      const int64_t of_column = c / kVectors * num_groups * kPanel + c % kVectors * kLanes;
      if constexpr (Format != Scaling::kEightBitOutputs) scale = widen_halves(scales + of_column);
      if constexpr (Format == Scaling::kFourBitGroups) minimum = widen_halves(minimums + of_column);
      for (int r = 0; r < Rows; ++r) {
        const FloatVec exact = __builtin_convertvector(sum[r][c], FloatVec);
        if constexpr (Format == Scaling::kEightBitOutputs) {
          total[r][c] += exact * rows.scales[group + r];
        } else {
          total[r][c] += exact * rows.scales[group + r] * scale;
          if constexpr (Format == Scaling::kFourBitGroups) total[r][c] += minimum * rows.sums[group + r];
        }
      }
    }
    codes += group_bytes;
    if constexpr (Format != Scaling::kEightBitOutputs) scales += kPanel;
    if constexpr (Format == Scaling::kFourBitGroups) minimums += kPanel;
    group += tile_rows;
  }
  if constexpr (Format == Scaling::kEightBitOutputs) {
    for (int c = 0; c < Columns; ++c) {
      const FloatVec scale = widen_halves(scales + c * kLanes);
      for (int r = 0; r < Rows; ++r) total[r][c] *= scale;
    }
  }
  const int64_t first_output = panel * kPanel, count = weight.num_outputs - first_output;
  if (count < Panels * kPanel) {
    float values[Rows][Columns * kLanes];
    for (int c = 0; c < Columns; ++c) {
      const int64_t past = c * kLanes, width = max_of(0, min_of(kLanes, count - past));
      const FloatVec bias = weight.bias ? widen_partial(weight.bias + first_output + past, width) : FloatVec{};
      for (int r = 0; r < Rows; ++r) store(&values[r][past], weight.bias ? total[r][c] + bias : total[r][c]);
    }
    store_part<Rows, Columns>(values, count, out, stride);
    return;
  }
  for (int c = 0; c < Columns; ++c) {
    if (weight.bias) {
      const FloatVec bias = load(weight.bias + first_output + c * kLanes);
      for (int r = 0; r < Rows; ++r) total[r][c] += bias;
    }
    for (int r = 0; r < Rows; ++r) store(out + r * stride + c * kLanes, total[r][c]);
  }
}

// The task begins at a tile of rows, so that no register tile spans two of them.
template <int Panels, Scaling Format>
void multiply_rows(const QuantizedWeight& weight, const QuantizedRows& rows, const PanelTask& task, int64_t panel,
                   float* out, int64_t stride) {
  static_assert(kRowTile % kMaxRows == 0);
  int64_t row = task.first_row;
  const int64_t end = row + task.num_rows;
  for (; row + kMaxRows <= end; row += kMaxRows, out += kMaxRows * stride)
    multiply_tile<kMaxRows, Panels, Format>(weight, rows, row, panel, out, stride);
  switch (end - row) {
    case 5: multiply_tile<5, Panels, Format>(weight, rows, row, panel, out, stride); break;
    case 4: multiply_tile<4, Panels, Format>(weight, rows, row, panel, out, stride); break;
    case 3: multiply_tile<3, Panels, Format>(weight, rows, row, panel, out, stride); break;
    case 2: multiply_tile<2, Panels, Format>(weight, rows, row, panel, out, stride); break;
    case 1: multiply_tile<1, Panels, Format>(weight, rows, row, panel, out, stride); break;
  }
}

template <Scaling Format>
void multiply_panels(const QuantizedWeight& weight, const QuantizedRows& rows, const PanelTask& task, float* out,
                     int64_t stride) {
  int64_t panel = task.first_panel;
  const int64_t end = panel + task.num_panels;
  for (; panel + kMaxPanels <= end; panel += kMaxPanels, out += kMaxPanels * kPanel)
    multiply_rows<kMaxPanels, Format>(weight, rows, task, panel, out, stride);
  for (; panel < end; ++panel, out += kPanel) multiply_rows<1, Format>(weight, rows, task, panel, out, stride);
}

void multiply(const QuantizedWeight& weight, const QuantizedRows& rows, const PanelTask& task, float* out,
              int64_t stride) {
  if (weight.minimums) multiply_panels<Scaling::kFourBitGroups>(weight, rows, task, out, stride);
  else if (weight.num_scales == rows.num_groups) multiply_panels<Scaling::kEightBitGroups>(weight, rows, task, out, stride);
  else multiply_panels<Scaling::kEightBitOutputs>(weight, rows, task, out, stride);
}

void read_output(const QuantizedWeight& weight, int64_t output, float factor, float* values) {
  const int64_t num_groups = weight.in_features / kGroup, bits = weight.minimums ? 4 : 8;
  const int64_t group_bytes = kGroup * kPanel * bits / 8, panel = output / kPanel, lane = output % kPanel;
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t group = panel * num_groups + g;
    const uint8_t* codes = weight.codes + group * group_bytes + 4 * lane;
    const int64_t place = (panel * weight.num_scales + (weight.num_scales > 1 ? g : 0)) * kPanel + lane;
    const float scale = widen_one(Float16{weight.scales[place]});
    const float minimum = bits == 4 ? widen_one(Float16{weight.minimums[place]}) : 0.0f;
    for (int64_t k = 0; k < kGroup; ++k) {
      const int64_t step = k / 4;
      const int code = bits == 8 ? codes[step * kStepBytes + k % 4] - 128
                                 : codes[step / 2 * kStepBytes + k % 4] >> 4 * (step % 2) & 15;
      values[g * kGroup + k] = factor * (scale * static_cast<float>(code) + minimum);
    }
  }
}

}  // namespace

extern const QuantizedKernel kQuantizedKernel = {quantize, multiply, read_output};

}  // namespace OCTAVO_ISA
}  // namespace octavo
